"""What is released: one version, and a wheel that works in a folder where there is no checkout."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

import vit_jax

ROOT = pathlib.Path(__file__).parent.parent


def test_changelog_and_citation_are_of_this_version():
    newest = re.search(r'^## \[(\d.*?)\]', (ROOT / 'CHANGELOG.md').read_text(), re.MULTILINE)
    cited = re.search(r'^version: (.+)$', (ROOT / 'CITATION.cff').read_text(), re.MULTILINE)
    assert newest[1] == cited[1] == vit_jax.__version__


FILES = 'setup.cfg', 'setup.py', 'pyproject.toml', 'README.md', 'LICENSE'
FOLDERS = 'configs', 'docs', 'vit_jax'


@pytest.mark.nightly
def test_an_installed_wheel_works_away_from_the_checkout(tmp_path):
    pytest.importorskip('pip')
    source, empty, installed = (tmp_path / name for name in ('source', 'empty', 'installed'))
    packages = [path for path in sys.path if path.endswith('site-packages')]
    source.mkdir()
    empty.mkdir()
    for part in FILES + FOLDERS:
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(ROOT / part, source / part)

    def python(*arguments, folder=empty):
        """What it says, with the packages that are here, of which vit_jax is no longer one."""
        environment = os.environ | {'PYTHONPATH': os.pathsep.join([str(installed), *packages])}
        command = [sys.executable, '-S', *map(str, arguments)]
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
        )
        return done.returncode, done.stdout + done.stderr

    alone = '--no-deps', '--no-index', '--no-build-isolation'
    code, text = python('-m', 'pip', 'install', *alone, '--target', installed, source)
    assert code == 0, text
    shutil.rmtree(source)

    code, text = python('-c', 'import vit_jax as v; print(v.__file__)')
    assert code == 0 and text.startswith(str(installed)), text
    assert (installed / 'vit_jax/py.typed').is_file()
    code, text = python(installed / 'bin/vit_jax')
    assert code == 0 and '  train ' in text
    page = pathlib.Path(text.partition('\nDocumentation: ')[2].strip())
    assert page == installed / 'share/doc/vit_jax/index.md'
    for other in page.parent.glob('*.md'):
        links = re.findall(r'\]\(([^)#:]+)(?:#[^)]*)?\)', other.read_text())
        within = [link for link in links if not link.startswith('..')]
        assert [link for link in within if not (page.parent / link).is_file()] == []
    short = '--config.total.steps=2', '--config.schedule.warmup.steps=1', '--config.batch_size=8'
    quick = '--config=configs/quickstart.py', '--workdir=run', *short, '--config.fewshot=none'
    code, text = python(installed / 'bin/vit_jax', 'train', *quick)
    assert code == 0 and '\nreached ' in text, text
    command = '--config=pretrain/vit.py:imagenet,B/16', '--workdir=other'
    code, text = python('-m', 'vit_jax.train', *command, '--config.data=nowhere')
    assert code == 1 and text.startswith("error: data='nowhere': "), text
