"""What the user can mend: errors of one sentence, which programs print without a traceback.

They are raised where something of the user's is looked at: a value, a file, a directory, another
host. Every other exception is a fault of the program, and is shown with its traceback.
"""


class UserError(ValueError):
    """An input that cannot be used: what is wrong, where, and what would be right."""


class MissingFile(UserError, FileNotFoundError):
    """A file or directory that is not there."""


class UnusableDisk(UserError, OSError):
    """A place that cannot be read or written: a full disk, a read-only directory."""
