"""Elements of HTML and SVG. Whatever text goes in, the document that comes out is well-formed."""

from __future__ import annotations

import re
from typing import Final, TypeAlias
from xml.etree import ElementTree as ET
from xml.etree.ElementTree import Element

Child: TypeAlias = "Element | str"
_NOT_XML: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that no XML document may contain, not even escaped."""


def tag(name: str, /, *children: Child, **attributes: str | float) -> Element:
    """An element; ``class_`` and ``aria_label`` name the attributes ``class`` and ``aria-label``."""
    made = Element(name, {_attribute(key): _clean(_value(value)) for key, value in attributes.items()})
    for child in children:
        if isinstance(child, Element):
            made.append(child)
        elif len(made):
            made[-1].tail = (made[-1].tail or "") + _clean(child)
        else:
            made.text = (made.text or "") + _clean(child)
    return made


def document(root: Element) -> str:
    """The text of an HTML page."""
    return "<!doctype html>\n" + ET.tostring(root, encoding="unicode", method="html") + "\n"


def _attribute(key: str) -> str:
    return key.rstrip("_").replace("_", "-")


def _value(value: str | float) -> str:
    """Coordinates need no more than a tenth of a pixel."""
    return value if isinstance(value, str) else f"{value:.1f}".removesuffix(".0")


def _clean(text: str) -> str:
    return _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text)
