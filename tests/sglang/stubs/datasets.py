"""Stands for datasets, which SGLang's test kit imports and these tests never use."""

from typing import Any


def load_dataset(*_: Any, **__: Any) -> Any:
    raise NotImplementedError
