"""Logs that are collected: each line an object that says which host it is of."""

import json
import socket
import subprocess
import sys

from running import LONG, finish, start

SPEAKER = """
import logging, sys, warnings
from maxds import command, lines

def main(args):
    lines.use_objects(3)
    warnings.warn("soon gone")
    logging.getLogger("orbax").error("%s of\\n%d", "part", 7)
    lines.complain("ALARM: look", "ALERT")
    lines.say("step 1")

command.run(main)
"""


def said(text):
    return [json.loads(line) for line in text.splitlines()]


def test_what_libraries_log_and_warn_of_is_said_as_the_run_s_own_words_are():
    done = subprocess.run([sys.executable, "-c", SPEAKER], capture_output=True, text=True, check=True)
    found = [*said(done.stdout), *said(done.stderr)]
    assert [(one["severity"], one["message"].partition("soon gone")[1] or one["message"]) for one in found] == [
        ("INFO", "step 1"),
        ("WARNING", "soon gone"),
        ("ERROR", "part of\n7"),
        ("ALERT", "ALARM: look"),
    ]
    assert all((one["process"], one["host"]) == (3, socket.gethostname()) for one in found)


def test_a_run_says_nothing_but_objects(tmp_path, program_cache):
    asked = "steps=2", "log_format=json"
    code, out, err = finish(start(tmp_path, program_cache, *LONG, *asked))
    assert (code, said(err)) == (0, [])
    found = said(out)
    assert all(one.keys() == {"time", "severity", "message", "process", "host"} for one in found)
    assert all((one["severity"], one["process"]) == ("INFO", 0) for one in found)
    assert [one["message"][:8] for one in found].count("step 1/2") == 1


def test_a_mistake_that_is_found_on_the_way_is_an_object_too(tmp_path, program_cache):
    code, _, err = finish(start(tmp_path, program_cache, "log_format=json", "data.sources=[{kind: text, path: none}]"))
    (mistake,) = said(err)
    assert (code, mistake["severity"]) == (2, "ERROR")
    assert "none" in mistake["message"]
