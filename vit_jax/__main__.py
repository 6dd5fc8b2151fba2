"""Lists the programs, or runs one: python -m vit_jax PROGRAM ..."""

import os
import pathlib
import re
import runpy
import signal
import sys


def find_programs() -> dict[str, str]:
    """Returns the summary of each program by name, from its docstring. Imports nothing."""
    summaries = {}
    for file in sorted(pathlib.Path(__file__).parent.glob('*.py')):
        source = file.read_text(encoding='utf-8')
        if file.stem != '__main__' and "if __name__ == '__main__':" in source:
            docstring = source.removeprefix('"""')
            summaries[file.stem] = re.split(r'[.]?\n|: python', docstring, maxsplit=1)[0]
    return summaries


def find_documentation() -> pathlib.Path | None:
    """Finds the first page of the documentation, in a checkout or as installed."""
    root = pathlib.Path(__file__).parent.parent
    installed_page = 'share/doc/vit_jax/index.md'
    candidates = [
        root / 'docs' / 'index.md',
        pathlib.Path(sys.prefix, installed_page),
        root / installed_page,
    ]
    return next((page for page in candidates if page.is_file()), None)


def main() -> None:
    """Runs the program named by the first argument with the remaining arguments."""
    name, *arguments = sys.argv[1:] or ['--help']
    if name == 'help' and arguments:
        name = arguments[0]
        arguments = ['--help']
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
    lines = [usage]
    lines += [f'  {name:<14}{summary}' for name, summary in find_programs().items()]
    page = find_documentation()
    if page is not None:
        lines.append(f'\nDocumentation: {page}')
    try:
        print('\n'.join(lines), flush=True)
    except OSError as error:  # such as a full disk
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(f'error: stdout: {error.strerror}')


if __name__ == '__main__':
    main()
