"""The exceptions of kvstrata; each tells the caller what to do."""


class KVStrataError(Exception):
    """Base of everything that kvstrata raises."""


class ArgumentError(KVStrataError, ValueError):
    """An argument of a call is wrong; the message names it. Fix the call."""


class ConfigError(KVStrataError, ValueError):
    """``open_tier`` cannot use its configuration or what lies at the root; the message names it."""


class ClosedError(KVStrataError):
    """The tier is closed, or belongs to the process that forked this one."""


class BusyError(KVStrataError):
    """The kernel still owns bytes of the arena; call ``close`` again later."""
