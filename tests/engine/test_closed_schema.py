"""Objects have the properties that their schema names, and no others."""

import json
from typing import Any

import pytest

from penstock.engine.closed_schema import closed
from penstock.engine.grammar import GrammarCompiler, grammar_of, lark_json
from penstock.engine.tokenizer import load_tokenizer
from penstock.zoo.registry import model_path


class Compiler(GrammarCompiler):
    def __init__(self) -> None:
        self.tokenizer = load_tokenizer(model_path("draft-base"))
        super().__init__(lambda: self.tokenizer, 4096, [2])

    def follows(self, grammar: str, value: Any) -> bool:
        reader = self.compile(grammar).result().deep_copy()
        tokens = self.tokenizer.encode(json.dumps(value), add_special_tokens=False)
        return reader.try_consume_tokens(tokens) == len(tokens) and reader.is_accepting()


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler()


def obj(*names: str, **more: Any) -> dict[str, Any]:
    properties = {name: {"type": "integer"} for name in names}
    return {"type": "object", "properties": properties, "required": list(names)} | more


B = {"$defs": {"b": obj("b")}}
REF = {"$ref": "#/$defs/b"}
NODE = obj("v")
NODE["properties"]["next"] = {"allOf": [{"$ref": "#"}], "description": "a list"}
KINDS = [obj("x", required=["k"], properties={"k": {"const": n}, "x": {}}) for n in "ab"]
EITHER: dict[str, Any] = {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}

# A schema, texts that follow it, and texts that do not once it is closed.
SCHEMAS: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "plain": (obj("a"), [{"a": 1}], [{"a": 1, "z": 1}, {"z": 1}]),
    "said to be open": (obj("a", additionalProperties=True), [{"a": 1, "z": 1}], [{"z": 1}]),
    "a dictionary": ({"type": "object", "additionalProperties": obj("a")}, [{"z": {"a": 1}}],
     [{"z": {"a": 1, "z": 1}}]),
    "any object": ({"type": "object"}, [{"z": 1}, {}], []),
    "an empty one": (obj(), [{}], [{"z": 1}]),
    "of more than it names": (obj(minProperties=1), [{"z": 1}], [{}]),
    "patterns": (obj("a", patternProperties={"^x": {}}), [{"a": 1, "x1": 2}], [{"a": 1, "z": 1}]),
    "or null": (obj("a", type=["object", "null"]), [{"a": 1}, None], [{"a": 1, "z": 1}]),
    "without a type": ({"properties": {"a": {}}}, [{"a": 1}, 3], [{"z": 1}]),
    "required alone": (obj(required=["q"]), [{"q": [1]}], [{"q": 1, "z": 1}]),
    "items": ({"type": "array", "items": obj("a")}, [[{"a": 1}]], [[{"a": 1, "z": 1}]]),
    "a tuple": ({"prefixItems": [obj("a")]}, [[{"a": 1}]], [[{"a": 1, "z": 1}], [{"a": 1}, 2]]),
    "a long tuple": ({"prefixItems": [True], "minItems": 2}, [[1, 2, 3]], [[1]]),
    "a reference": ({**B, **REF}, [{"b": 1}], [{"b": 1, "z": 1}]),
    "recursive": (NODE, [{"v": 1, "next": {"v": 2}}], [{"v": 1, "next": {"v": 2, "z": 1}}]),
    "any of": ({**B, "anyOf": [obj("a"), REF, {"type": "null"}]}, [{"a": 1}, {"b": 1}, None],
     [{"a": 1, "b": 1}, {"b": 1, "z": 1}]),
    "any of, beside names": ({**B, **obj("k"), "anyOf": [obj("a"), REF]},
     [{"k": 1, "a": 1}, {"k": 1, "b": 1}],
     [{"k": 1}, {"k": 1, "a": 1, "b": 1}, {"k": 1, "b": 1, "z": 1}]),
    "either is required": (obj("a", "b", required=[], **EITHER), [{"a": 1}],
     [{}, {"a": 1, "z": 1}]),
    "one of": ({"oneOf": KINDS}, [{"k": "a", "x": 1}], [{"k": "b", "z": 1}]),
    "all of": ({"allOf": [obj("a"), obj("b")]}, [{"a": 1, "b": 1}], [{"a": 1, "b": 1, "z": 1}]),
    "all of, with references": ({**B, "allOf": [REF, obj("a")], "properties": {"c": REF}},
     [{"b": 1, "a": 1}, {"b": 1, "a": 1, "c": {"b": 1}}],
     [{"b": 1, "a": 1, "z": 1}, {"b": 1, "a": 1, "c": {"b": 1, "z": 1}}]),
    "a reference beside names": ({**B, **REF, "properties": {"a": {}}},
     [{"b": 1}, {"b": 1, "a": 1}], [{"b": 1, "z": 1}]),
    "all of, with any of inside": ({"allOf": [{"anyOf": [obj("a"), obj("b")]}, obj("c")]},
     [{"a": 1, "c": 1}, {"b": 1, "c": 1}], [{"a": 1, "c": 1, "z": 1}]),
    "all of beside any of": ({"allOf": [obj("c")], "anyOf": [obj("a"), obj("b")]},
     [{"c": 1, "a": 1}, {"c": 1, "b": 1}], [{"c": 1, "a": 1, "z": 1}]),
    "all of, one of them open": ({"allOf": [obj("a", additionalProperties=True), obj("b")]},
     [{"a": 1, "b": 1, "z": 1}], [{"a": 1}]),
    "a value like a schema": ({"const": obj()}, [obj()], [{}]),
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEMAS)
def test_no_other_names(compiler: Compiler, name: str) -> None:
    schema, right, wrong = SCHEMAS[name]
    grammar = grammar_of("json", schema)
    assert [compiler.follows(grammar, value) for value in right] == [True] * len(right)
    assert [compiler.follows(grammar, value) for value in wrong] == [False] * len(wrong)


def test_in_text_in_lark_and_at_every_depth(compiler: Compiler) -> None:
    inner = {"items": {"properties": {"in": {"items": REF}}}}
    schema = {**B, "patternProperties": {"^p": inner}, "additionalProperties": inner}
    for place in ("p", "q"):
        for grammar in (
            grammar_of("json", json.dumps(schema)),
            grammar_of("lark", f"start: {lark_json(schema)}"),
        ):
            assert compiler.follows(grammar, {place: [{"in": [{"b": 1}]}]})
            assert not compiler.follows(grammar, {place: [{"in": [{"b": 1, "z": 1}]}]})
            assert not compiler.follows(grammar, {place: [{"z": 1}]})


UNCHANGED: list[Any] = [
    {"properties": 3}, {"required": [{}]}, {"allOf": 1, "anyOf": 2}, {"$ref": 7, "required": ["a"]},
    {"$ref": "#/$defs/none", "required": ["a"]}, {"$ref": "other.json", "required": ["a"]},
    {"minProperties": "1"}, "{", True,
    # Each definition stands for twice the next one.
    {"$defs": {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(99)},
     "allOf": [{"$ref": "#/$defs/d0"}] * 2},
    # A large one stands in many places.
    {"$defs": {"b": obj(*map(str, range(5000)))}, "prefixItems": [{**REF, "required": []}] * 30},
    {"$defs": {"b": {"prefixItems": [{}] * 5000}}, "prefixItems": [{**REF, "allOf": [{}]}] * 30},
    {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, obj("b")]}}, "$ref": "#/$defs/a"},
]  # fmt: skip


@pytest.mark.parametrize("schema", UNCHANGED, ids=range(len(UNCHANGED)))
def test_what_is_no_schema_or_grows_too_large_stays_as_it_is(schema: Any) -> None:
    assert closed(schema) == schema
