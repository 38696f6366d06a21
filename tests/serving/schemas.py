"""Fifty JSON schemas: recursive, enums, patterns, numbers, lists, choices, and as generators write them."""

STRING, SHORT = dict(type="string"), dict(type="string", maxLength=12)
INTEGER, NUMBER, TRUTH = dict(type="integer"), dict(type="number"), dict(type="boolean")


def record(required=None, **properties):
    names = list(properties) if required is None else required
    return dict(type="object", properties=properties, required=names, additionalProperties=False)


def several(items, least=0, most=3):
    return dict(type="array", items=items, minItems=least, maxItems=most)


def defined(name, schema, start=None):
    """A schema that may refer to itself by a name."""
    return {"$defs": {name: schema}} | (start or {"$ref": f"#/$defs/{name}"})


def ref(name):
    return {"$ref": f"#/$defs/{name}"}


PERSON = record(name=SHORT, age=dict(type="integer", minimum=0, maximum=120))
SCHEMAS = [
    record(),
    record(name=SHORT),
    PERSON,
    record(["name"], name=SHORT, nickname=SHORT, age=INTEGER),
    record([], a=INTEGER, b=INTEGER),
    record(person=PERSON, friends=several(PERSON)),
    record(value=NUMBER),
    record(value=dict(type="number", minimum=0, maximum=1)),
    record(value=dict(type="number", exclusiveMinimum=-3.5, exclusiveMaximum=2)),
    record(value=dict(type="integer", minimum=-50, maximum=50)),
    record(value=dict(type="integer", minimum=1000)),
    record(value=dict(type="integer", multipleOf=5, minimum=0, maximum=100)),
    record(value=TRUTH, other=dict(type="null")),
    record(mood=dict(enum=["glad", "sad", "neither \"nor\"", "日本"])),
    record(mixed=dict(enum=[1, "1", None, True, [1], dict(a=1)])),
    record(kind=dict(const="fixed"), size=dict(const=3)),
    record(code=dict(type="string", pattern="^[A-Z]{2}-[0-9]{4}$")),
    record(code=dict(type="string", pattern="^(red|green|blue)(ish)?$")),
    record(hex=dict(type="string", pattern="^#[0-9a-f]{6}$")),
    record(word=dict(type="string", minLength=3, maxLength=9)),
    record(day=dict(type="string", format="date")),
    record(at=dict(type="string", format="date-time")),
    record(time=dict(type="string", format="time")),
    record(id=dict(type="string", format="uuid")),
    record(address=dict(type="string", format="ipv4")),
    record(mail=dict(type="string", format="email", maxLength=40)),
    several(INTEGER),
    several(dict(type="integer", minimum=0, maximum=9), 4, 4),
    several(several(TRUTH, 1, 2), 1, 2),
    dict(type="array", prefixItems=[SHORT, INTEGER], items=False, minItems=2),
    dict(type="array", prefixItems=[TRUTH], items=NUMBER, minItems=1, maxItems=3),
    dict(anyOf=[INTEGER, SHORT]),
    dict(anyOf=[record(cat=SHORT), record(dog=INTEGER)]),
    dict(oneOf=[record(kind=dict(const="a"), a=INTEGER), record(kind=dict(const="b"), b=SHORT)]),
    dict(type=["integer", "null"]),
    record(maybe=dict(anyOf=[SHORT, dict(type="null")])),
    dict(allOf=[record(["a"], a=INTEGER, b=INTEGER), dict(required=["b"])]),
    dict(type="object", additionalProperties=dict(type="integer", minimum=0, maximum=9), maxProperties=3),
    dict(type="object", properties=dict(a=INTEGER), required=["a"], additionalProperties=TRUTH, maxProperties=2),
    SHORT,
    dict(type="string", enum=["only"]),
    TRUTH,
    dict(type="null"),
    defined("tree", record(["value"], value=dict(type="integer", minimum=0, maximum=9), left=ref("tree"))),
    defined("list", dict(anyOf=[dict(type="null"), record(head=TRUTH, tail=ref("list"))])),
    defined("node", record(name=dict(enum=["x", "y"]), children=several(ref("node"), 0, 2))),
    defined("either", dict(anyOf=[dict(type="integer", minimum=0, maximum=9), several(ref("either"), 0, 2)])),
    defined("point", record(x=NUMBER, y=NUMBER), record(start=ref("point"), end=ref("point"))),
    dict(title="Answer", description="What it is", default=dict()) | record(
        steps=several(record(explanation=SHORT, output=SHORT), 1, 2), final_answer=SHORT
    ),
    record(city=dict(type="string", description="A city", maxLength=20), unit=dict(enum=["celsius", "fahrenheit"])),
]  # fmt: skip
assert len(SCHEMAS) == 50
