"""The page of concepts: its words are those of the glossary, and its pictures are drawn in one way."""

import re
import xml.etree.ElementTree as ET

import pytest

import prose

PAGE = prose.ROOT / "docs" / "concepts.md"
GLOSSARY = prose.ROOT / "docs" / "glossary.md"
PICTURES = sorted((prose.ROOT / "docs" / "concepts").glob("*.svg"))
SVG = "{http://www.w3.org/2000/svg}"


def bold(page):
    return re.findall(r"\*\*([^*]+)\*\*", prose.text(page))


def test_words_are_those_of_the_glossary():
    known = {word.strip() for entry in bold(GLOSSARY) for word in entry.split(",")}
    words = bold(PAGE)
    assert len(words) > 30
    assert [word for word in words if not {word, word.removesuffix("s")} & known] == []


def test_every_picture_is_shown():
    shown = [link for link in prose.links(PAGE) if link.startswith("concepts/")]
    assert shown
    assert sorted(shown) == [f"concepts/{picture.name}" for picture in PICTURES]


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.stem)
def test_pictures_are_drawn_in_one_way(picture):
    root, model = ET.parse(picture).getroot(), ET.parse(PICTURES[0]).getroot()
    style = root.findtext(f"{SVG}style")
    assert style == model.findtext(f"{SVG}style")
    assert root.get("class") == "concept"
    assert root.get("role") == "img"
    assert root.get("aria-label")
    assert float(root.get("width")) <= 440, "on a phone, the letters would be too small"
    used = {name for one in root.iter() for name in (one.get("class") or "").split()}
    assert all(f".concept .{name}{{" in style for name in used - {"concept"})
    colours = [one for one in root.iter() if {"fill", "stroke", "style"} & set(one.keys())]
    assert colours == [], "colours belong in the style, which knows light and dark"
