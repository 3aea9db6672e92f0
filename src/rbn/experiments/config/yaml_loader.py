"""YAML files: with YAML 1.2 numbers, without duplicate keys or alias bombs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_MAX_NODES = 10_000  # values in a file, with aliases expanded


def read_yaml(path: Path) -> dict[str, Any]:
    """The settings of a YAML file."""
    try:
        import yaml
    except ImportError as error:
        raise ImportError(
            "configs need PyYAML: pip install 'recurrent-batchnorm[train]'"
        ) from error
    try:
        content = parse_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: invalid dates
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must contain settings by name")
    return content


def parse_yaml(text: str) -> Any:
    """Parse YAML. Reads 1e-3 as a number, like YAML 1.2; PyYAML reads it as a string."""
    import yaml

    loader: Any = type("Loader", (yaml.SafeLoader,), {"construct_mapping": _without_duplicates})
    number = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")
    loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789"))
    reader = loader(text)
    try:
        node = reader.get_single_node()
        if _expanded_size(node, {}) > _MAX_NODES:
            raise ValueError(f"its aliases expand to more than {_MAX_NODES:,} values")
        return None if node is None else reader.construct_document(node)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    finally:
        reader.dispose()


def _expanded_size(node: Any, known: dict[int, int]) -> int:
    """The number of values of a YAML node with all aliases expanded."""
    import yaml

    if node is None or isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in known:
        known[id(node)] = _MAX_NODES  # for an alias to a node that contains it
        parts = node.value
        if isinstance(node, yaml.MappingNode):
            parts = [part for pair in parts for part in pair]
        known[id(node)] = 1 + sum(_expanded_size(part, known) for part in parts)
    return known[id(node)]


def _without_duplicates(loader: Any, node: Any, deep: bool = False) -> dict[Any, Any]:
    """Construct a mapping. Rejects duplicate keys, of which PyYAML keeps the last."""
    import yaml

    seen: set[Any] = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"duplicate key {key.value!r}", key.start_mark
                )
            seen.add(key.value)
    mapping: dict[Any, Any] = yaml.SafeLoader.construct_mapping(loader, node, deep=deep)
    return mapping
