"""Names that timm, transformers, keras, big_vision and Lightning have for the fields here.

A name that resembles that of its field needs no entry.
"""

from collections.abc import Sequence

# FIELD, or FIELD=VALUE: other names for it.
SYNONYMS = {
    'start_from': 'pretrained model_name arch checkpoint init_from model_init finetune weights',
    'image_size': 'img_size input_size resolution size',
    'held_out.fraction': 'validation_split val_split val_fraction test_size',
    'accumulation_steps': 'gradient_accumulation_steps grad_accum grad_accum_steps accum_iter',
    'total.epochs': 'num_train_epochs num_epochs max_epochs total_epochs n_epochs',
    'total.steps': 'max_steps total_steps num_steps num_train_steps iterations',
    'loss': 'criterion loss_fn class_weights class_weight',
    'loss.kind=sigmoid': 'bce bce_loss multi_label multilabel',
    'optimizer.kind': 'opt optim optimizer_name optax_name',
    'optimizer.weight_decay': 'decay wd l2_reg',
    'optimizer.b1': 'betas beta1 beta_1 adam_beta1',
    'optimizer.clip_norm': 'grad_clip clip_grad grad_clip_norm clipnorm max_grad_norm',
    'optimizer.layer_decay': 'llrd layer_lr_decay layerwise_lr_decay',
    'optimizer.trained_blocks=0': 'freeze freeze_backbone freeze_encoder linear_probe trainable',
    'schedule.kind': 'sched scheduler lr_scheduler lr_scheduler_type lr_schedule decay_type',
    'schedule.learning_rate': 'lr base_lr peak_lr max_lr',
    'schedule.warmup.fraction': 'warmup_ratio',
    'regularization.stochastic_depth': 'drop_path drop_path_rate stoch_depth stochdepth',
    'polyak_decay': 'ema ema_decay model_ema model_ema_decay use_ema',
    'augmentation.flip': 'hflip horizontal_flip random_flip',
    'augmentation.randaugment': 'aa auto_augment randaug rand_augment',
    'log_every_steps': 'logging_steps log_interval log_every log_every_n_steps log_training_steps',
    'eval_every_steps': 'evaluation_strategy eval_strategy eval_steps val_interval eval_interval',
    'checkpoint_every_steps': 'save_steps save_strategy save_every ckpt_steps checkpoint_steps',
    'keep_checkpoints': 'save_total_limit checkpoint_hist max_to_keep',
    'tensorboard': 'wandb use_wandb log_wandb report_to logger',
    'compute.dtype=bfloat16': 'mixed_precision precision amp bf16 fp16 half',
    'compute.remat': 'gradient_checkpointing grad_checkpointing activation_checkpointing',
    'loader.threads': 'num_workers workers dataloader_num_workers num_parallel_calls',
    'model.width': 'embed_dim hidden_size hidden_dim',
    'model.depth': 'num_layers num_hidden_layers',
    'model.mlp_dim': 'intermediate_size mlp_ratio',
    'model.pool': 'global_pool pooling',
}
# Names for which there is no field: what to do instead.
_NO_FIELD = {
    'resume resume_from resume_from_checkpoint auto_resume': 'run the same command again to resume',
    'early_stopping patience save_best save_best_only load_best_model_at_end': 'there is no best '
    'checkpoint; --config.keep_checkpoints=1000 keeps all that --config.checkpoint_every_steps '
    'saves, and WORKDIR/checkpoints/STEP is used as a checkpoint',
    'num_classes n_classes num_labels': 'leave it out: the number of classes is that of the data',
    'output_dir out_dir save_dir log_dir logdir default_root_dir': 'results go to --workdir=DIR',
    'device devices gpus gpu accelerator num_gpus n_gpu': 'all devices are used; choose with the '
    'environment: JAX_PLATFORMS=cpu, CUDA_VISIBLE_DEVICES=0',
}


def translate(name: str, paths: Sequence[str]) -> str | None:
    """Ends an error message about another program's name for a field; None for other names.

    Args:
      name: The unknown name.
      paths: All fields of the configuration, as `config.FIELD.FIELD`.
    """
    word = name.lower().replace('-', '_')
    for words, advice in _NO_FIELD.items():
        if word in words.split():
            return advice
    for target, words in SYNONYMS.items():
        field, equals, value = target.partition('=')
        path = next((path for path in paths if path.endswith(f'.{field}')), None)
        if word in words.split() and path is not None:
            return f"did you mean '--{path}{equals}{value}'?"
    return None
