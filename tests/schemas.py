"""Random JSON schemas, and random values that satisfy them, for tests of json/."""
import json
import random
import string

LETTERS = string.ascii_letters + string.digits + ' _-."\\/\n\té日🙂<>&'
PATTERNS = {  # and a text that each matches
    r"^[a-z]{2,5}$": lambda r: "".join(r.choice(string.ascii_lowercase) for _ in range(r.randint(2, 5))),
    r"^\d{3}-\d{4}$": lambda r: f"{r.randint(0, 999):03}-{r.randint(0, 9999):04}",
    r"^(foo|bar)+x?$": lambda r: "".join(r.choice(["foo", "bar"]) for _ in range(r.randint(1, 4))) + r.choice(["", "x"]),
    r"^#[0-9A-Fa-f]{6}$": lambda r: f"#{r.randrange(1 << 24):06x}",
    r"[0-9]$": lambda r: text(r, 0, 5) + str(r.randint(0, 9)),
    r"^[^\"]\w*\.(txt|md)$": lambda r: r.choice("aé日") + r.choice(["", "b_9"]) + r.choice([".txt", ".md"]),
}
FORMATS = {
    "date": lambda r: f"{r.randint(1, 9999):04}-{r.randint(1, 12):02}-{r.randint(1, 28):02}",
    "time": lambda r: f"{r.randint(0, 23):02}:{r.randint(0, 59):02}:{r.randint(0, 59):02}" + r.choice(["Z", ".25Z", "+01:30"]),
    "uuid": lambda r: "-".join("%0*x" % (n, r.randrange(16 ** n)) for n in (8, 4, 4, 4, 12)),
    "ipv4": lambda r: ".".join(str(r.randint(0, 255)) for _ in range(4)),
    "email": lambda r: f"{r.choice(['ann', 'a.b-c', 'x_1'])}@{r.choice(['example.com', 'a-b.example.org'])}",
}
FORMATS["date-time"] = lambda r: FORMATS["date"](r) + "T" + FORMATS["time"](r)


def text(r, least, most):
    return "".join(r.choice(LETTERS) for _ in range(r.randint(least, most)))


def number(r, low, high):
    return r.choice([round(r.uniform(low, high), r.randint(1, 4)), r.randint(int(low), int(high))])


def string_schema(r):
    kind = r.randrange(5)
    if kind == 0:
        return {"type": "string"}, lambda r: text(r, 0, 8)
    if kind == 1:
        least, most = r.randint(0, 4), r.randint(4, 9)
        return {"type": "string", "minLength": least, "maxLength": most}, lambda r: text(r, least, most)
    if kind == 2:
        pattern = r.choice(list(PATTERNS))
        return {"type": "string", "pattern": pattern}, PATTERNS[pattern]
    if kind == 3:
        pattern = r.choice(list(PATTERNS))
        def short(r):
            return next((t for t in (PATTERNS[pattern](r) for _ in range(50)) if len(t) <= 9), None)
        return {"type": "string", "pattern": pattern, "maxLength": 9}, short
    name = r.choice(list(FORMATS))
    return {"type": "string", "format": name}, FORMATS[name]


def number_schema(r):
    whole = r.random() < 0.5
    schema = {"type": "integer" if whole else "number"}
    low, high = sorted([r.randint(-1200, 1200), r.randint(-1200, 1200)])
    low, high = low - 2, high + 2
    if not whole:
        low, high = low / r.choice([1, 10, 1000]), high / r.choice([1, 10])
        low, high = min(low, high), max(low, high) + 1
    if r.random() < 0.6:
        schema[r.choice(["minimum", "exclusiveMinimum"])] = low
    if r.random() < 0.6:
        schema[r.choice(["maximum", "exclusiveMaximum"])] = high
    return schema, (lambda r: r.randint(int(low), int(high))) if whole else (lambda r: number(r, low, high))


def any_value(r, depth=2):
    kind = r.randrange(7 if depth else 5)
    if kind < 5:
        return [None, True, r.randint(-99, 99), text(r, 0, 5), round(r.uniform(-5, 5), 2)][kind]
    n = r.randint(0, 3)
    return [any_value(r, depth - 1) for _ in range(n)] if kind == 5 else {text(r, 1, 4): any_value(r, depth - 1) for _ in range(n)}


def enum_schema(r):
    values = []
    for _ in range(r.randint(1, 4)):
        value = any_value(r, 1)
        if value not in values:
            values.append(value)
    if len(values) == 1:
        return {"const": values[0]}, lambda r: values[0]
    return {"enum": values}, lambda r: r.choice(values)


def array_schema(r, depth):
    least, most = r.randint(0, 2), r.randint(2, 4)
    item, make = make_schema(r, depth - 1)
    if r.random() < 0.3:
        front = [make_schema(r, depth - 1) for _ in range(r.randint(1, 3))]
        schema = {"type": "array", "prefixItems": [s for s, _ in front], "items": item}
        if r.random() < 0.5:
            schema["items"] = False
            schema["minItems"] = r.randint(0, len(front))
        def tuple_of(r):
            values = [m(r) for _, m in front]
            return values[:r.randint(schema.get("minItems", 0), len(values))] if schema["items"] is False else values + [make(r)]
        return schema, tuple_of
    schema = {"type": "array", "items": item}
    if r.random() < 0.7:
        schema["minItems"], schema["maxItems"] = least, most
    return schema, lambda r: [make(r) for _ in range(r.randint(least, most))]


def object_schema(r, depth):
    names = r.sample(["a", "b", "id", "name", "naïve", "a b", 'q"', "x/y~", "long_name_of_a_property", ""], r.randint(0, 5))
    made = {name: make_schema(r, depth - 1) for name in names}
    required = [name for name in names if r.random() < 0.6]
    schema = {"type": "object", "properties": {name: s for name, (s, _) in made.items()}, "required": required}
    others = r.choice([None, False, None, make_schema(r, 0)])
    if others is False:
        schema["additionalProperties"] = False
    if isinstance(others, tuple):
        schema["additionalProperties"] = others[0]

    def make(r):
        value = {name: m(r) for name, (_, m) in made.items() if name in required or r.random() < 0.5}
        for _ in range(r.randint(0, 2) if isinstance(others, tuple) else 0):
            key = r.choice(["zz", "nam", "ab", "ü", "idx", "other \"key\""])
            if key not in made:
                value[key] = others[1](r)
        return value
    return schema, make


def case_schema(r, depth):
    key = r.choice(["anyOf", "anyOf", "oneOf"])
    if key == "anyOf":
        cases = [make_schema(r, depth - 1) for _ in range(r.randint(1, 3))]
        return {"anyOf": [s for s, _ in cases]}, lambda r: r.choice(cases)[1](r)
    cases = [object_schema(r, depth - 1) for _ in range(r.randint(1, 3))]
    for i, (schema, _) in enumerate(cases):
        schema["properties"] = {"kind": {"const": f"k{i}"}, **schema["properties"]}
        schema["required"] = ["kind"] + schema["required"]
    def make(r):
        i = r.randrange(len(cases))
        return {"kind": f"k{i}", **cases[i][1](r)}
    return {"oneOf": [s for s, _ in cases]}, make


def make_schema(r, depth=3):
    """A schema, and a function that makes a value of it (or None, if it finds none)."""
    kinds = [string_schema, number_schema, enum_schema, lambda r: ({"type": "boolean"}, lambda r: r.random() < 0.5),
             lambda r: ({"type": ["integer", "null"]}, lambda r: r.choice([None, r.randint(-5, 5)])),
             lambda r: (r.choice([{}, True]), any_value)]
    if depth > 0:
        kinds += [lambda r: array_schema(r, depth), lambda r: object_schema(r, depth),
                  lambda r: object_schema(r, depth), lambda r: case_schema(r, depth)]
    return r.choice(kinds)(r)


def make_root(r):
    """The same with things that only a whole schema has: $defs, references, recursion, allOf."""
    schema, make = make_schema(r)
    kind = r.randrange(6)
    if kind == 0:
        return {"$defs": {"it": schema}, "type": "array", "items": {"$ref": "#/$defs/it"}, "maxItems": 3}, \
            lambda r: [make(r) for _ in range(r.randint(0, 3))]
    if kind == 1:
        node = {"type": "object", "properties": {"value": schema, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
                "required": ["value", "next"], "additionalProperties": False}
        def chain(r):
            value = None
            for _ in range(r.randint(1, 3)):
                value = {"value": make(r), "next": value}
            return value
        return {"$defs": {"node": node}, "$ref": "#/$defs/node"}, chain
    if kind == 2:
        first, make_first = object_schema(r, 1)
        first.pop("additionalProperties", None)
        first["properties"] = {f"1{k}": v for k, v in first["properties"].items()}
        first["required"] = [f"1{k}" for k in first["required"]]
        second = {"type": "object", "properties": {"z": schema}, "required": ["z"]}
        return {"allOf": [first, second], "title": "T", "description": "D"}, \
            lambda r: {**{f"1{k}": v for k, v in make_first(r).items() if f"1{k}" in first["properties"]}, "z": make(r)}
    return schema, make


def written(r, value):
    """The value as JSON in the form that json/ writes: a space or none behind `:` and `,`."""
    return json.dumps(value, ensure_ascii=False, separators=(r.choice([",", ", "]), r.choice([":", ": "])))
