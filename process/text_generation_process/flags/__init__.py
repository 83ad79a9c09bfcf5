"""The flags of the launcher by subject, in the order of --help, with the children that get them."""

from text_generation_process.flags.model import MODEL
from text_generation_process.flags.processes import PROCESS, SHARDS
from text_generation_process.flags.router import HTTP_SIDE, LIMITS
from text_generation_process.option import Option

OPTIONS: tuple[Option, ...] = (*MODEL, *SHARDS, *LIMITS, *HTTP_SIDE, *PROCESS)
