"""What the leak check takes for granted of the Rust tests that may run beside these."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def test_rust_tests_make_folders_in_memory_by_the_function_that_names_them(
    repository: Path,
) -> None:
    sources = [*repository.glob("tests/rust/**/*.rs"), *repository.glob("rust/**/*.rs")]
    made = [source for source in sources if '"/dev/shm' in source.read_text()]
    assert [str(source.relative_to(repository)) for source in made] == [
        "rust/kvstrata-testkit/src/memory.rs"
    ]
