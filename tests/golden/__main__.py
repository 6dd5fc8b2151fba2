"""Writes the golden texts."""

from tests import golden

for old in golden.TEXTS.glob('*.txt'):
    old.unlink()
for path in golden.FILES:
    golden.golden(path).write_text(golden.text(path))
