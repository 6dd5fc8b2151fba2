"""Lists the programs, or runs one: python -m vit_jax PROGRAM ..."""

import os
import pathlib
import re
import runpy
import signal
import sys


def find_programs() -> dict[str, str]:
    """Returns the summary of each program by name, from its docstring. Imports nothing."""
    files = sorted(pathlib.Path(__file__).parent.glob('*.py'))
    texts = {f.stem: f.read_text(encoding='utf-8') for f in files if f.stem != '__main__'}
    return {
        name: re.split(r'[.]?\n|: python', text.removeprefix('"""'), maxsplit=1)[0]
        for name, text in texts.items()
        if "if __name__ == '__main__':" in text
    }


def find_documentation() -> pathlib.Path | None:
    """Finds the first page of the documentation, in a checkout or as installed."""
    parent, page = pathlib.Path(__file__).parent.parent, 'share/doc/vit_jax/index.md'
    pages = parent / 'docs' / 'index.md', pathlib.Path(sys.prefix, page), parent / page
    return next((page for page in pages if page.is_file()), None)


def main() -> None:
    """Runs the program named by the first argument with the remaining arguments."""
    name, *arguments = sys.argv[1:] or ['--help']
    if name == 'help' and arguments:
        name, arguments = arguments[0], ['--help']
    if name in ('-h', '--help', 'help'):
        _list_programs()
    elif name in ('-V', '--version', 'version'):
        from vit_jax import __version__

        print(f'vit_jax {__version__}')
    elif name in find_programs():
        sys.argv = [name, *arguments]
        runpy.run_module(f'vit_jax.{name}', run_name='__main__', alter_sys=True)
    else:
        from vit_jax.base.records import closest

        print(f'error: unknown program {name!r}; {closest(name, find_programs())}', file=sys.stderr)
        sys.exit(2)


def _list_programs() -> None:
    if hasattr(signal, 'SIGPIPE'):  # not on Windows
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` closes stdout early
    usage = 'usage: vit_jax PROGRAM ..., or python -m vit_jax.PROGRAM ... (--help for its flags)\n'
    lines = [usage, *(f'  {name:<14}{text}' for name, text in find_programs().items())]
    if (page := find_documentation()) is not None:
        lines.append(f'\nDocumentation: {page}')
    try:
        print('\n'.join(lines), flush=True)
    except OSError as error:  # such as a full disk
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(f'error: stdout: {error.strerror}')


if __name__ == '__main__':
    main()
