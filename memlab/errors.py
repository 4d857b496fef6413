"""The one exception that memlab raises on purpose."""


class MemlabError(Exception):
    """A step, strategy or call that memlab cannot carry out: the message says what happened, where, and what to do."""


MemlabError.__module__ = "memlab"
