"""What the commands have in common: flags anywhere on the line, quiet libraries, one message for a mistake."""

import contextlib
import gc
import logging as stdlib_logging
import sys
from collections.abc import Callable, Iterator

import fsspec.config
from absl import app, flags, logging


def run(main: Callable[[list[str]], int | None]) -> None:
    """Parses the flags and runs `main` on the rest; exits with its code, or with 2 where a flag is mistaken."""
    gc.freeze()  # what is imported stays
    # What lies in a bucket is looked up each time, for other processes write there, too.
    fsspec.config.conf.setdefault("gcs", {})["use_listings_cache"] = False
    logging.set_verbosity(logging.WARNING)
    # Of failures that are told of in one sentence, Orbax logs tracebacks, through absl's own logger.
    logging.get_absl_logger().setLevel(stdlib_logging.CRITICAL)
    # Of a damaged checkpoint's many arrays, Orbax reports one and leaves the rest to be printed as never retrieved.
    stdlib_logging.getLogger("asyncio").setLevel(stdlib_logging.CRITICAL)
    app.run(main, flags_parser=_parse)


@contextlib.contextmanager
def seldom_collecting() -> Iterator[None]:
    """For tracing, which makes millions of objects that stay: Python's collector would go through them all the time."""
    often = gc.get_threshold()
    gc.set_threshold(100_000)
    try:
        yield
    finally:
        gc.set_threshold(*often)


def _parse(args: list[str]) -> list[str]:
    flags.FLAGS.set_gnu_getopt(True)
    try:
        return flags.FLAGS(args)
    except flags.Error as error:
        print(error, file=sys.stderr)
        sys.exit(2)
