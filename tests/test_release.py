import pathlib
import re

import vit_jax

ROOT = pathlib.Path(vit_jax.__file__).parent.parent


def test_changelog_and_citation_are_of_this_version():
    newest = re.search(r'^## \[(\d.*?)\]', (ROOT / 'CHANGELOG.md').read_text(), re.MULTILINE)
    cited = re.search(r'^version: (.+)$', (ROOT / 'CITATION.cff').read_text(), re.MULTILINE)
    assert newest[1] == cited[1] == vit_jax.__version__
