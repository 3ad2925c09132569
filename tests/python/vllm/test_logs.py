"""Our messages come out where vLLM's do, unless somebody has arranged otherwise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = """
import logging
import vllm.logger
{before}
from kvstrata.vllm import compat, plugin
plugin.register()
# As vLLM does when it knows its arguments.
vllm.logger._configure_vllm_root_logger()
compat.require_version()
logging.getLogger("kvstrata.memory.largepages").info("said quietly")
logging.getLogger("kvstrata").warning("said aloud")
"""


def output(before: str = "", **environment: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(before=before)],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
        timeout=120,
    )
    return ran.stdout


def lines(printed: str, text: str) -> list[str]:
    return [line for line in printed.splitlines() if text in line]


def test_messages_of_every_level_come_once_in_vllms_form() -> None:
    printed = output()
    (quiet,) = lines(printed, "said quietly")
    (aloud,) = lines(printed, "said aloud")
    assert "INFO" in quiet
    assert "WARNING" in aloud


def test_vllms_level_is_ours() -> None:
    printed = output(VLLM_LOGGING_LEVEL="WARNING")
    assert not lines(printed, "said quietly")
    assert len(lines(printed, "said aloud")) == 1


@pytest.mark.parametrize("logger", ["kvstrata", ""])
def test_who_has_set_up_handlers_gets_each_message_once(logger: str) -> None:
    before = (
        f"handler = logging.StreamHandler(); logger = logging.getLogger({logger!r})\n"
        "handler.setFormatter(logging.Formatter('mine: %(message)s'))\n"
        "logger.addHandler(handler); logger.setLevel(logging.INFO)"
    )
    printed = output(before)
    assert lines(printed, "said quietly") == ["mine: said quietly"]
    assert lines(printed, "said aloud") == ["mine: said aloud"]


def test_a_configuration_file_of_vllm_that_names_us_is_obeyed(tmp_path: Path) -> None:
    config = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"mine": {"format": "mine: %(message)s"}},
        "handlers": {"mine": {"class": "logging.StreamHandler", "formatter": "mine"}},
        "loggers": {"kvstrata": {"handlers": ["mine"], "level": "WARNING"}},
    }
    path = tmp_path / "logging.json"
    path.write_text(json.dumps(config))
    printed = output(VLLM_LOGGING_CONFIG_PATH=str(path))
    assert not lines(printed, "said quietly")
    assert lines(printed, "said aloud") == ["mine: said aloud"]
