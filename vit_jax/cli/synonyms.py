"""Names that other programs have for the fields of a configuration, and the fields."""

from collections.abc import Collection, Sequence

# Names that timm, transformers, keras, big_vision and Lightning have for a field or its value.
SYNONYMS = {
    'start_from': 'pretrained model_name arch checkpoint init_from model_init finetune weights',
    'data': 'dataset data_dir data_path train_dir train_data_dir',
    'image_size': 'img_size input_size resolution size',
    'held_out.fraction': 'validation_split val_split val_fraction test_size',
    'batch_size': 'train_batch_size per_device_train_batch_size',
    'eval_batch_size': 'val_batch_size validation_batch_size per_device_eval_batch_size',
    'accumulation_steps': 'gradient_accumulation_steps grad_accum grad_accum_steps accum_iter',
    'total.epochs': 'num_train_epochs num_epochs max_epochs total_epochs n_epochs',
    'total.steps': 'max_steps total_steps num_steps num_train_steps iterations',
    'loss': 'criterion loss_fn',
    'loss.kind=sigmoid': 'bce bce_loss multi_label multilabel',
    'loss.label_smoothing': 'smoothing label_smooth',
    'optimizer.kind': 'opt optim optimizer_name optax_name',
    'optimizer.weight_decay': 'decay wd l2_reg',
    'optimizer.b1': 'betas beta1 beta_1 adam_beta1',
    'optimizer.b2': 'beta2 beta_2 adam_beta2',
    'optimizer.epsilon': 'eps opt_eps adam_epsilon',
    'optimizer.clip_norm': 'grad_clip clip_grad grad_clip_norm clipnorm max_grad_norm '
    'gradient_clip_val clip_gradients',
    'optimizer.layer_decay': 'llrd layer_lr_decay layerwise_lr_decay',
    'optimizer.trained_blocks=0': 'freeze freeze_backbone freeze_encoder linear_probe trainable',
    'schedule.kind': 'decay sched scheduler lr_scheduler lr_scheduler_type lr_schedule decay_type',
    'schedule.learning_rate': 'lr base_lr peak_lr max_lr',
    'schedule.warmup.epochs': 'warmup_epochs',
    'schedule.warmup.steps': 'warmup_steps num_warmup_steps',
    'schedule.warmup.fraction': 'warmup_ratio',
    'regularization.stochastic_depth': 'drop_path drop_path_rate stoch_depth stochdepth',
    'regularization.dropout': 'drop drop_rate dropout_rate hidden_dropout_prob',
    'polyak_decay': 'ema ema_decay model_ema model_ema_decay use_ema',
    'augmentation.flip': 'hflip horizontal_flip random_flip',
    'augmentation.randaugment': 'aa auto_augment randaug rand_augment',
    'augmentation.erasing': 'reprob random_erasing',
    'augmentation': 'aug augment augmentations transform transforms',
    'seed': 'random_seed random_state',
    'log_every_steps': 'logging_steps log_interval log_every log_every_n_steps log_training_steps',
    'eval_every_steps': 'evaluation_strategy eval_strategy eval_steps val_interval eval_interval '
    'check_val_every_n_epoch',
    'checkpoint_every_steps': 'save_steps save_strategy save_every ckpt_steps checkpoint_steps',
    'keep_checkpoints': 'save_total_limit checkpoint_hist max_to_keep',
    'compute.dtype=bfloat16': 'mixed_precision precision amp bf16 fp16 half',
    'compute.remat': 'gradient_checkpointing grad_checkpointing activation_checkpointing',
    'loader.threads': 'num_workers workers dataloader_num_workers num_parallel_calls',
    'model.width': 'embed_dim hidden_size hidden_dim',
    'model.depth': 'num_layers num_hidden_layers',
    'model.num_heads': 'heads num_attention_heads',
    'model.mlp_dim': 'intermediate_size mlp_ratio',
    'model.pool': 'global_pool pooling',
}
_NO_BEST = (
    'there is no early stopping and no best checkpoint: --config.eval_every_steps=epoch '
    '--config.checkpoint_every_steps=epoch --config.keep_checkpoints=1000 keep all of them, and '
    'WORKDIR/checkpoints/STEP is used as a checkpoint'
)
# Names for which there is no field, and what to do instead.
_NO_FIELD = {
    'resume resume_from resume_from_checkpoint auto_resume restore': 'run the same command again '
    'to resume',
    'early_stopping early_stop patience': _NO_BEST,
    'save_best save_best_only load_best_model_at_end monitor metric_for_best_model': _NO_BEST,
    'wandb use_wandb log_wandb report_to logger': 'Weights & Biases is not supported; '
    '--config.tensorboard=true writes event files, and WORKDIR/metrics.jsonl has all numbers',
    'k_fold kfold folds n_folds n_splits cross_validation': 'there is no cross-validation; run '
    'once for each part, held out by a column split of a table or by --config.held_out.seed',
    'class_weights class_weight weighted_loss sample_weight weighted_sampler balanced': 'there are '
    'no class weights; --config.loss may be a function of yours',
    'num_classes n_classes num_labels': 'leave it out: the number of classes is that of the data',
    'output_dir out_dir save_dir log_dir logdir default_root_dir': 'results go to --workdir=DIR',
    'device devices gpus gpu accelerator num_gpus n_gpu': 'all devices are used; choose with the '
    'environment: JAX_PLATFORMS=cpu, CUDA_VISIBLE_DEVICES=0',
    'shuffle': 'training images are always shuffled, by --config.seed',
    'tta test_time_augmentation': 'there is no test-time augmentation',
}


def translate(name: str, paths: Sequence[str], here: Collection[str] = ()) -> str | None:
    """Ends an error message about another program's name for a field; None for other names.

    Args:
      name: The unknown name.
      paths: All fields of the configuration, as `config.FIELD.FIELD`.
      here: The fields to prefer if the name has several meanings.
    """
    word = name.lower().replace('-', '_')
    for words, text in _NO_FIELD.items():
        if word in words.split():
            return text
    targets = [target for target, words in SYNONYMS.items() if word in words.split()]
    near = [t for t in targets if t.partition('=')[0].rpartition('.')[2] in here]
    meant = []
    for target in near or targets:
        field, equals, value = target.partition('=')
        path = next((path for path in paths if path.endswith(f'.{field}')), None)
        meant += [f"'{path}{equals}{value}'"] if path else []
    return f'did you mean {" or ".join(meant)}?' if meant else None
