"""deploy/: manifests match the schemas, their commands are valid, and exit code 75 is a restart."""

import gzip
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys

import jsonschema
import pytest
import yaml

from tests.hosts import ROOT
from vit_jax import train

DEPLOY, SCHEMAS = ROOT / 'deploy', ROOT / 'tests/schemas'
needs_kubectl = pytest.mark.skipif(not shutil.which('kubectl'), reason='needs kubectl')
has_docker = (
    shutil.which('docker') and subprocess.run(['docker', 'info'], stdout=-3).returncode == 0
)


def strict(schema):
    """Rejects unknown fields everywhere, as `kubeconform -strict` does."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {'additionalProperties': False} if isinstance(schema.get('properties'), dict) else {}
    return {name: strict(value) for name, value in schema.items()} | closed


def read_schema(name):
    return strict(json.loads(gzip.decompress((SCHEMAS / f'{name}.json.gz').read_bytes())))


def render(place):
    command = ['kubectl', 'kustomize', str(DEPLOY / 'gke' / place)]
    return yaml.safe_load(subprocess.run(command, check=True, capture_output=True).stdout)


def check_jobset(jobset):
    """Checks the manifest; returns its Job and its pod."""
    jsonschema.validate(jobset, read_schema('jobset'))
    (replicated,) = jobset['spec']['replicatedJobs']
    job = replicated['template']['spec']
    pod = job['template']['spec']
    assert job['parallelism'] == job['completions'] and job['completionMode'] == 'Indexed'
    assert pod['restartPolicy'] == 'Never'  # otherwise podFailurePolicy is rejected
    ends, rules = jobset['spec']['failurePolicy'], job['podFailurePolicy']['rules']
    assert (rules[0]['action'], rules[0]['onExitCodes']['operator']) == ('FailJob', 'In')
    assert {75, 137} <= {*rules[0]['onExitCodes']['values']} and job['backoffLimit'] == 0
    assert not {1, 2} & {*rules[0]['onExitCodes']['values']}
    (rule,) = ends['rules']  # other exit codes: the backoffLimit, and no restart
    assert (rule['action'], rule['onJobFailureReasons']) == ('FailJobSet', ['BackoffLimitExceeded'])
    return job, pod


def check_flags(words):
    """Parses the command's flags as the program does."""
    start = next(n for n, word in enumerate(words) if word.endswith('vit_jax.train')) + 1
    arguments = train.make_parser().parse_args(words[start:])
    assert arguments.config.checkpoint_every_steps  # the default is a single one, at the end
    return arguments


@pytest.mark.gate
def test_the_base_manifest_matches_the_schema():
    jobset = yaml.safe_load((DEPLOY / 'gke/base/jobset.yaml').read_text())
    _, pod = check_jobset(jobset)
    check_flags([*pod['containers'][0]['command'], *pod['containers'][0]['args']])
    jobset['spec']['replicatedJobs'][0]['template']['spec']['backofLimit'] = 1
    with pytest.raises(jsonschema.ValidationError, match='backofLimit'):
        check_jobset(jobset)


@needs_kubectl
@pytest.mark.gate
@pytest.mark.parametrize('place', ['v5e', 'v6e', 'tpu7x'])
def test_a_tpu_slice_has_a_pod_for_each_host(place):
    job, pod = check_jobset(render(place))
    sides = pod['nodeSelector']['cloud.google.com/gke-tpu-topology'].split('x')
    per_host = pod['containers'][0]['resources']['limits']['google.com/tpu']
    assert math.prod(map(int, sides)) == job['parallelism'] * per_host


@needs_kubectl
def test_gpu_pods_know_their_place():
    """Kubernetes replaces $(JOB_COMPLETION_INDEX) by the number of the pod."""
    jobset = render('h100')
    job, pod = check_jobset(jobset)
    words = [*pod['containers'][0]['command'], *pod['containers'][0]['args']]
    arguments = check_flags([word.replace('$(JOB_COMPLETION_INDEX)', '1') for word in words])
    assert (arguments.num_processes, arguments.process_id) == (job['completions'], 1)
    name, group = jobset['metadata']['name'], jobset['spec']['replicatedJobs'][0]['name']
    assert arguments.coordinator_address.startswith(f'{name}-{group}-0-0.{name}:')


def test_the_task_of_skypilot_matches_its_schema(tmp_path):
    task, schemas = yaml.safe_load((DEPLOY / 'skypilot.yaml').read_text()), read_schema('skypilot')
    jsonschema.validate(task, schemas['task'])
    jsonschema.validate(task['resources'], schemas['resources'])
    assert task['resources']['job_recovery']['recover_on_exit_codes'] == [75]
    place = {'SKYPILOT_NODE_IPS': '10.0.0.1\n10.0.0.2', 'SKYPILOT_NUM_NODES': '2'}
    env = task['envs'] | place | {'SKYPILOT_NODE_RANK': '1'}
    stub = tmp_path / '.venv/bin/python'
    stub.parent.mkdir(parents=True)
    stub.write_text('#!/bin/sh\nfor word in "$@"; do echo "$word"; done\n')
    stub.chmod(0o755)
    how = {'cwd': tmp_path, 'env': env | {'PATH': os.environ['PATH']}}
    words = subprocess.run(
        ['bash', '-c', task['run']], capture_output=True, text=True, **how
    ).stdout
    arguments = check_flags(words.splitlines())
    assert (arguments.num_processes, arguments.process_id) == (task['num_nodes'], 1)
    assert arguments.coordinator_address == '10.0.0.1:8476'
    assert arguments.workdir == task['envs']['WORKDIR']


def run_slurm(folder, srun, count=''):
    """Runs deploy/slurm.sh with this script as `srun`; the work directory is `run`."""
    scripts = {'srun': f'printf "%s\\n" "$@" > {folder}/words; {srun}', 'scontrol': 'echo "$@"'}
    scripts['script'] = (
        (DEPLOY / 'slurm.sh')
        .read_text()
        .replace('workdir=/shared/run', f'workdir="{folder}/a run"')
    )
    for name, text in scripts.items():
        (folder / name).write_text(f'#!/bin/bash\n{text}\n')
        (folder / name).chmod(0o755)
    (folder / 'a run').mkdir(exist_ok=True)
    env = os.environ | {'PATH': f'{folder}:{os.environ["PATH"]}', 'SLURM_JOB_ID': '7'}
    env |= {'SLURM_CPUS_PER_TASK': '12', 'SLURM_RESTART_COUNT': count}
    command = [folder / 'script', '--config.seed=1']
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True)


@pytest.mark.parametrize(
    'code, count, requeued',
    [(75, '', 'requeue 7\n'), (137, '1', 'requeue 7\n'), (75, '100', ''), (1, '', ''), (0, '', '')],
)
def test_slurm_queues_a_job_again_after_exit_code_75_and_a_kill(code, count, requeued, tmp_path):
    done = run_slurm(tmp_path, f'exit {code}', count)
    assert (done.returncode, done.stdout) == (code, requeued)
    words = (tmp_path / 'words').read_text().splitlines()
    assert '--cpus-per-task=12' in words and check_flags(words).config.seed == 1


def test_slurm_queues_a_job_that_makes_no_step_at_most_three_times(tmp_path):
    steps = """echo '{"run": 1, "event": "reported", "step": 50}' >> '%s'; exit 137"""
    steps %= f'{tmp_path}/a run/events.jsonl'
    for starts in 4, 2:  # a start with steps in between counts again from zero
        ends = [run_slurm(tmp_path, 'exit 137').stdout for _ in range(starts)]
        assert ends == ['requeue 7\n' if start < 3 else '' for start in range(starts)]
        assert [run_slurm(tmp_path, steps).stdout for _ in range(5)] == ['requeue 7\n'] * 5


def copied():
    """The files and folders that the Dockerfile copies into an image."""
    lines = re.findall('^COPY (.*)$', (DEPLOY / 'Dockerfile').read_text(), re.MULTILINE)
    return [name for line in lines for name in line.split()[:-1]]


def test_an_image_has_no_files_of_the_user_and_does_not_run_as_root():
    text = (DEPLOY / 'Dockerfile').read_text()
    assert not {'.', '*', 'tests', 'benchmarks'} & {*copied()}
    assert all((ROOT / name).exists() for name in copied())
    for target in text.split('\nFROM ')[2:]:
        assert re.findall('^USER (.*)$', target, re.MULTILINE)[-1:] == ['vit'], target
    _, pod = check_jobset(yaml.safe_load((DEPLOY / 'gke/base/jobset.yaml').read_text()))
    assert pod['securityContext']['runAsNonRoot']


def dockerfile():
    """The install command of the target `cpu`, and the command of the comment at the top."""
    text = (DEPLOY / 'Dockerfile').read_text()
    install = re.search(r'AS cpu\nRUN pip (install .*)', text)[1]
    return shlex.split(install), re.search(r'IMAGE (python .*)', text)[1].split()[1:]


@pytest.mark.nightly
@pytest.mark.skipif(has_docker, reason='the image is built instead')
def test_the_lines_of_the_dockerfile_install_what_the_quickstart_needs(tmp_path):
    """In a virtual environment; the line of apt-get is not run."""
    install, program = dockerfile()
    ignored = (DEPLOY / 'Dockerfile.dockerignore').read_text().replace('**/', '').split()
    (copy := tmp_path / 'vit_jax').mkdir()
    for name in copied():
        if (ROOT / name).is_dir():
            ignore = shutil.ignore_patterns(*ignored)
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(ROOT / name, copy / name)
    subprocess.run([sys.executable, '-m', 'venv', tmp_path / 'venv'], check=True)
    python = tmp_path / 'venv/bin/python'
    subprocess.run([python, '-m', 'pip', *install], cwd=copy, check=True, timeout=900)
    short = ['--config.total.steps=3', '--config.schedule.warmup.steps=1']
    command = [python, *program, *short, f'--workdir={tmp_path}/run']
    env = os.environ | {'XLA_FLAGS': '', 'PYTHONPATH': ''}
    done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and 'reached' in done.stdout, done.stderr


@pytest.mark.nightly
@pytest.mark.skipif(not has_docker, reason='needs docker')
def test_the_image_is_built_and_runs_the_quickstart():
    build = ['docker', 'build', '-q', '--target=cpu', '-f', DEPLOY / 'Dockerfile', ROOT]
    image = subprocess.run(build, check=True, capture_output=True, text=True).stdout.strip()
    _, program = dockerfile()
    subprocess.run(['docker', 'run', '--rm', image, 'python', *program], check=True)


def test_every_image_has_the_packages_that_the_commands_need():
    """The data is tfds:..., and the work directory gs://..."""
    for name in 'Dockerfile', 'skypilot.yaml':
        for extras in re.findall(r"'\.\[(.*)\]'", (DEPLOY / name).read_text()):
            assert {'gs', 'tfds'} <= {*extras.split(',')}
