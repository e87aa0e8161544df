"""Makes tests/goldens/jinja.json: what jinja2, set up as transformers does, makes of each construct that formats/jinja.c has.

    python tests/make_jinja.py
    needs: pip install jinja2

Behind the constructs stand 300 random programs.

A row is a template, the variables given to it where they are not VALUES, and the text; null: it is refused.
"""
import datetime
import json
import random
import re
from pathlib import Path

from jinja2 import nodes, utils
from jinja2.ext import Extension
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

GOLDENS = Path(__file__).parent / "goldens"
DATE = "2025-06-28"
OWN = {"bos_token": "<s>", "eos_token": "</s>"}
VALUES = {
    "n": 7, "x": 2.5, "yes": True, "no": False, "nothing": None, "empty": "", "word": "Zürich", "text": "  one two\tthree \n four  ",
    "list": [3, 1, 2], "words": ["b", "A", "c", "a"], "nested": [[1, [2, "x"]], {"k": [None, True, 1.0]}], "map": {"b": 1, "a": 2, "C": [1]},
    "people": [{"name": "Ann", "age": 30, "at": {"city": "Bern"}}, {"name": "bob", "age": 25, "at": {"city": "Köln"}},
               {"name": "Cid", "age": 30, "at": {"city": "Bern"}}],
    "odd": "漢字 😀 e\u0301 \"quoted\" 'single' \\ \u0007 \u00a0\n", "lines": "one\ntwo\n\nthree\n", "big": 12345678901234567890,
    "reals": [1.0, -0.5, 1e-07, 1e22, 0.1, 123456.789, 1e16, 3.0e-5, 100.0], "html": "<a href=\"x\">&'</a>",
    "messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}, {"role": "assistant", "content": "A", "items": 1}],
}

# Each row is a template by itself; those between braces are expressions.
EXPRESSIONS = r"""
1 + 2 * 3 ** 2 - 4 / 2 | 7 // 2 | -7 // 2 | -7 % 3 | 7 % -3 | 7.5 % 2 | 2 ** -1 | 2 ** 10 | 1 / 3 | 10 / 5 | 1e3 | 1_000 | 0x1F | 0b101 | 0o17 | 2.50 | 1.5e-7
-2 ** 2 | -n | +n | - x | not yes | not no and yes | no or 'x' | '' or 'y' | yes and 0 | 1 < 2 < 3 | 1 < 3 < 2 | 1 == 1.0 | true == 1 | 'a' < 'b' | [1, 2] < [1, 3]
'a' ~ 1 ~ none ~ 2.0 ~ true | 'a' + 'b' * 3 | [1] + [2] | (1, 2) + (3,) | [1] * 2 | 3 * 'ab' | 'a' in 'cat' | 'x' not in 'cat' | 2 in list | 'b' in map | 9 in map
'x' if yes | 'x' if no | 'x' if no else 'y' | 'a' if no else 'b' if no else 'c' | (1, 'a', none) | () | (1,) | [] | {} | {'a': 1, 'b': [2, {'c': none}]} | {1: 2, 'x': yes}
'it''s' | "a" 'b' | 'tab\\tnew\\nline' | '\\x41\\u00e9\\U0001F600\\101' | '\\q' | "a'b" | 'a"b' | "\\'" | 'a\\\\b' | ['it\\'s', "q\\"q", 'both\\'"']
word[0] | word[-1] | word[1:3] | word[::-1] | word[::2] | word[10] | word[-3:] | word[:-1] | list[1] | list[-1] | list[5] | list[1:] | list[::-1] | list[5:] | list[:0] | odd[0:4] | (1, 2, 3)[1:]
map.b | map['a'] | map.missing | map['missing'] | map.get('b') | map.get('z') | map.get('z', 5) | map.items() | map.keys() | map.values() | map.keys() | list | map.items() | list
messages[0].role | messages[0]['content'] | messages[2]['items'] | messages[2].items is callable | messages[-1].content | messages | length | messages[1:] | map(attribute='role') | join(',')
undefined_name | undefined_name is defined | undefined_name | default('d') | undefined_name | length | undefined_name | list | undefined_name == other | 'a' ~ undefined_name | nothing | nothing.x | n.x
text.strip() | text.lstrip() | text.rstrip() | text.split() | text.split(' ') | text.split(none, 1) | text.rsplit(none, 1) | 'a,b,,c'.split(',') | 'a,b,c'.split(',', 1) | 'a,b,c'.rsplit(',', 1) | ''.split() | ''.split(',')
'xxhixx'.strip('x') | 'xyhi'.lstrip('yx') | 'hixy'.rstrip('xy') | 'héh'.strip('h') | lines.splitlines() | lines.splitlines(true) | 'a\\r\\nb\\rc'.splitlines() | word.startswith('Z') | word.endswith('ch') | word.startswith(('a', 'Z'))
'aXbX'.replace('X', '-') | 'aXbX'.replace('X', '-', 1) | 'abc'.replace('', '-') | 'ab'.replace('', '-', 2) | word.upper() | word.lower() | 'straße'.upper() | "they're bill's".title() | "they're bill's" | title | 'hello wOrld'.capitalize() | 'hello-wOrld (x)' | title
','.join(['a', 'b']) | ''.join([]) | 'hello'.find('l') | 'hello'.find('z') | 'hello'.rfind('l') | 'häl'.find('l') | 'hello'.index('l') | 'hello'.count('l') | 'aaa'.count('aa') | 'abc'.count('')
'{} {}'.format(1, 'a') | '{1} {0}'.format(1, 'a') | '{a}-{b.b}'.format(a=1, b=map) | '{:>5}|{:<5}|{:^5}|{:05d}|{:.2f}|{{}}'.format('a', 'b', 'c', 42, 2.345) | '%s is %d' | format('x', 3) | '%5.1f|%-5s|%05d|%x' % (2.25, 'ab', 42, 255) | '%(a)s' % {'a': 1} | '%s%%' % 5 | '%r' % 'a'
'abc'.removeprefix('a') | 'abc'.removesuffix('bc') | '12'.isdigit() | 'a1'.isalpha() | 'a1'.isalnum() | ' '.isspace() | 'AB'.isupper() | 'ab'.islower() | ''.isdigit()
list | first | list | last | [] | first | word | first | word | last | (map) | first | list | length | word | length | (map) | length | (map) | count | list | sum | list | max | list | min | words | max | words | min | people | sum(attribute='age') | people | max(attribute='age') | list | sum(start=10)
list | sort | list | sort(reverse=true) | words | sort | words | sort(case_sensitive=true) | people | sort(attribute='age') | map(attribute='name') | list | people | sort(attribute='at.city,age') | length | people | map(attribute='at.city') | list | (map) | sort | {'b': 1, 'A': 2} | dictsort | {'b': 1, 'A': 2} | dictsort(true) | {'b': 1, 'A': 2} | dictsort(false, 'value') | list
words | unique | list | [1, 2, 1, 3, 2] | unique | list | people | unique(attribute='age') | map(attribute='name') | list | people | groupby('age') | list | people | groupby('at.city') | map(attribute='grouper') | list | people | groupby('at.city') | map(attribute='list') | map('length') | list
words | map('upper') | list | words | map('replace', 'a', 'z') | join | people | map(attribute='x', default='?') | list | words | join('-') | people | join(', ', attribute='name') | [1, none, 2.0] | join(' ') | words | reverse | list | word | reverse | (map) | items | list | undefined_name | items | list
people | selectattr('age', 'equalto', 30) | map(attribute='name') | list | people | rejectattr('age', '==', 30) | list | length | people | selectattr('x') | list | people | selectattr('at.city', 'in', ['Bern']) | list | length | list | select('odd') | list | list | reject('odd') | list | [0, 1, '', 'a'] | select | list | [1, none, 2] | reject('none') | list | people | selectattr('name', 'defined') | list | length
list | batch(2) | list | list | batch(2, 'x') | list | list | slice(2) | list | [1, 2, 3, 4] | slice(3, 'x') | list | '42' | int | '4x' | int | '4x' | int(7) | '3.7' | int | 3.9 | int | 'ff' | int(base=16) | '2.5' | float | 'x' | float | 'x' | float(1.5) | 3 | float | -3 | abs | -2.5 | abs | none | int
2.5 | round | 3.5 | round | 2.345 | round(2) | 2.1 | round(method='ceil') | 2.9 | round(0, 'floor') | 42 | round | 42.55 | round(1, 'floor') | n | string | [1, 'a'] | string | yes | string | x | string | nothing | string
lines | indent | lines | indent(2) | lines | indent(2, true) | lines | indent(2, blank=true) | lines | indent('> ', first=true) | word | center(11) | word | center(3) | 'one two three four' | truncate(11) | 'one two three four' | truncate(11, true) | 'one two three four' | truncate(11, false, '!', 0) | text | wordcount | text | trim | 'xax' | trim('x') | (map) | attr('items') is callable | n | default(3) | empty | default('e') | empty | default('e', true) | d
nothing | tojson | yes | tojson | n | tojson | x | tojson | word | tojson | odd | tojson | reals | tojson | big | tojson | nested | tojson | (map) | tojson | [] | tojson | {} | tojson | people | tojson(indent=2) | nested | tojson(indent=4) | [[], {}] | tojson(indent=2) | (map) | tojson(sort_keys=true) | (map) | tojson(separators=(',', ':')) | odd | tojson(ensure_ascii=true) | {1: 2, none: 3, true: 4} | tojson | html | tojson | 'a' | safe | (map) | tojson | safe
reals | nested | odd | [odd] | big | (map) | 1e16 | 1e15 | 123456789012345680.0 | 0.0001 | 0.00001 | 1.0 | -0.0 | [1.0, 'a', true, none] | list | string | 5 | string | 1e22 | string
n is defined | n is number | x is number | yes is number | x is integer | n is integer | yes is integer | x is float | word is string | n is string | list is iterable | word is iterable | n is iterable | (map) is mapping | list is mapping | list is sequence | word is sequence | (map) is sequence | (1, 2) is sequence | none is none | n is none | yes is boolean | n is boolean | yes is true | no is false | 1 is true
n is odd | n is even | n is divisibleby 7 | n is divisibleby(2) | n is eq 7 | n is equalto 7 | n is ne 7 | n is gt 6 | n is ge 7 | n is lt 6 | n is le 7 | n is sameas 7 | 2 is in list | 2 is in([1]) | 'a' is lower | 'A' is upper | n is not defined | n is not number | n is undefined | not n is defined | 'abs' is filter | 'zzz' is filter | 'odd' is test | x is escaped | n is defined and n == 7 | 1 + n is number
namespace(a=1).a | namespace(a=1).b | dict(a=1, b=2) | dict([('a', 1)]) | range(3) | list | range(1, 4) | list | range(5, 0, -2) | list | range(0) | list | range(3) | length | range(5)[2] | strftime_now('%d %b %Y') | strftime_now('%Y-%m-%d') | bos_token + 'x' + eos_token | list.index(1) | list.count(3) | (1, 2).index(2) | true | True | none | None | false
'{:,}'.format(1234567) | '{:,} {:,}'.format(999, -1000) | '{:,.2f}'.format(1234567.891) | '{:,}'.format(-123456.5) | '{:,d}'.format(1000) | '{:,}'.format(true) | 'a {:,}%'.format(n * 1000)
'{:>12,}'.format(1234567) | '{:+,}'.format(1234) | '{:,>5}'.format(7) | '{:*^+9.1f}'.format(2.25) | '{:=+6}'.format(-42) | '{:06.1f}'.format(-2.5) | '{:<06}'.format(3) | '{:05}'.format('a') | '{:é>3}'.format('a') | '{:.2}'.format(3.14159) | '{:.2}'.format(12.0) | '{:.3}'.format(1.0) | '{:.0}'.format(3.7) | '{:8.3}'.format(120.0) | '{:,}'.format(1e16) | '{:,.1f}'.format(123) | '{: d}'.format(5) | '{:X}'.format(255) | '{:,}'.format(big) | '{:5}'.format(yes) | '%-5d|%+d|% d|%05.1f|%5s|%.2s|%i' % (7, 7, 7, -2.5, yes, 'abc', 2.9) | '%-05d|' % 3 | '%.0f' % 1e20 | '%5r' % word
'a -- b, word--word and word---word' | wordwrap(7) | 'x-ray a-b-c d-e fg-h i-jk-lm' | wordwrap(6) | 'no--split-at-1-2 or (-x)' | wordwrap(5) | 'well_-known --flag "it"--is' | wordwrap(6) | 'ab-cd--ef' | wordwrap(6)
text | wordwrap(8) | lines | wordwrap(4) | 'one two three' | wordwrap(7) | 'a well-known e-mail of the x-ray state' | wordwrap(12) | 'averyverylongword and more' | wordwrap(6) | 'averyverylongword and more' | wordwrap(6, false) | 'up-to-date now' | wordwrap(6, break_on_hyphens=false) | 'one two three' | wordwrap(5, wrapstring='|') | word * 3 | wordwrap(5) | '  two words' | wordwrap(5) | 'abc de-fghijklmno' | wordwrap(4) | empty | wordwrap
n | pprint | (map) | pprint | people | pprint | nested | pprint | text | pprint | odd | pprint | (word ~ ' ') * 20 | pprint | [(word ~ ' ') * 20, 1] | pprint | {'b': [text * 3, (1,)], 'a': ((word * 20,),)} | pprint | 'x' * 90 | pprint | [list * 30] | pprint | [lines * 10, '', [], {}] | pprint | undefined_name | pprint | nothing | pprint
x|round|int | (n)|string|length | n|string ~ 'a' | [n, x]|map('string')|join | word|upper|lower|title | 'a' 'b'|upper | -n|abs | not n|string | 2 ** 3 ** 2 | 10 - 2 - 3 | 2 * 3 % 4 | 'a' ~ 1 + 2 | [1, 2, 3,] | {'a': 1,}.a | (1 if yes else 2) + 1 | n == 7 and x == 2.5 or no | 1 in [1] == true
""".strip().split("\n")

REFUSED = """{{ undefined_name.x }}|{{ map.missing.x }}|{{ 1 + 'a' }}|{{ 'a' + 1 }}|{{ 1 / 0 }}|{{ 1 % 0 }}|{{ undefined_name + 1 }}|{{ undefined_name() }}|{{ n() }}|{{ n | nofilter }}|{{ n is notest }}|{{ none | length }}|{{ n | length }}
{{ raise_exception('no') }}|{{ list.append(4) }}|{{ map.update({}) }}|{{ map.pop('a') }}|{{ list.sort() }}|{{ [1, 'a'] | sort }}|{{ 1 < 'a' }}|{{ none < 1 }}|{% for x in 5 %}{% endfor %}|{% for x in none %}{% endfor %}|{{ undefined_name | tojson }}|{{ range(1000000) }}
{{ ''.split('') }}|{{ 'a'.index('b') }}|{{ list.index(9) }}|{{ 1 in 5 }}|{{ 5 in 'a' }}|{{ ','.join([1]) }}|{% macro f(a) %}{% endmacro %}{{ f(1, 2) }}|{% macro f(a) %}{% endmacro %}{{ f(b=2) }}|{% set map.x = 1 %}|{% set a, b = [1] %}|{{ '%d' % 'a' }}|{{ '%s' % (1, 2) }}|{{ '{} {}'.format(1) }}|{{ '{:,}'.format('a') }}|{{ '{:.2}'.format(3) }}|{{ '{:,d}'.format(2.5) }}|{{ '{:d}'.format('5') }}|{{ '{:=5}'.format('a') }}|{{ '{:s}'.format(5) }}|{{ '{:5}'.format(none) }}|{{ '%x' % 2.5 }}|{% filter wordwrap(0) %}a{% endfilter %}
{{|{{ 1 |}}|{% if %}{% endif %}|{% if yes %}|{% endif %}|{% for x %}{% endfor %}|{{ 1 + }}|{{ (1 }}|{{ 'abc }}|{% unknown %}|{# open|{{ a b }}|{{ [1, 2 }}|{% set %}|{% set 1 = 2 %}|{{ 1 is }}|{% macro %}{% endmacro %}|{{ !a }}|{{ n | }}|{{ '\\x4' }}|{% else %}|{% include 'x' %}|{% extends 'x' %}|{{ $ }}|{{ namespace(_a=1) }}|{{ people | map('nofilter') | list }}
{{ list[{}] }}{{ {[]: 1} }}|{{ {{}: 1} }}|{{ word.nomethod() }}|{{ none() }}|{{ map | first | nofilter }}|{{ words | join(1, 2, 3) }}|{{ n | upper(1) }}|{{ word | replace('a') }}|{{ (1, 2) | tojson(3, 4, 5, 6, 7) }}|{% set ns = namespace() %}{% set ns.__x = 1 %}|{{ people | selectattr }}|{{ reals | max(1, 2, 3) }}|{{ nothing + 1 }}|{{ -word }}|{{ -undefined_name }}""".split("\n")

STATEMENTS = [
    "a\n{% if yes %}\nb\n{% endif %}\nc\n", "  {% if yes %}  x  {% endif %}  \n  y", "a {%- if yes -%} b {%- endif -%} c", "a\n  {%- if yes %}\n  b{% endif %}", "a {%+ if yes %} b {% endif +%}\n c", "  {{ n }}\n  {{- n -}}\n  z\n",
    "{# comment #}\nx{#- y -#}  z {# a\nb #}\n  {# indented #}\nend\n\n", "{% raw %}{{ x }} {% if %}{% endraw %}", "a\n  {% raw -%}  \n {{ y }}\n {%- endraw %}\n b", "x\r\ny\rz\r\n", "{{ 'a\r\nb' }}", "{% if yes %}\n\n a\n{% endif %}", "\t{% if yes %}tab{% endif %}\n\n",
    "{% for x in list %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.depth }};{{ loop.previtem }}<{{ x }}>{{ loop.nextitem }}\n{% endfor %}",
    "{% for k, v in map.items() %}{{ k }}={{ v }}{% if not loop.last %}, {% endif %}{% endfor %}", "{% for x in [] %}a{% else %}none{% endfor %}", "{% for x in list if x > 1 %}{{ loop.index }}:{{ x }} {% else %}none{% endfor %}", "{% for x in list if x > 9 %}{{ x }}{% else %}none{% endfor %}",
    "{% for x in list %}{% if x == 1 %}{% continue %}{% endif %}{{ x }}{% endfor %}", "{% for x in list %}{% if x == 1 %}{% break %}{% endif %}{{ x }}{% endfor %}", "{% for c in word %}{{ c }}.{% endfor %}", "{% for k in map %}{{ k }}{% endfor %}", "{% for x in range(3) %}{% for y in range(x) %}{{ loop.index }}{{ x }}{{ y }} {% endfor %}{{ loop.index }}{% endfor %}",
    "{% set x = 1 %}{% for i in list %}{% set x = i %}{{ x }}{% endfor %}{{ x }}", "{% set ns = namespace(x=0, y='a') %}{% for i in list %}{% set ns.x = ns.x + i %}{% set ns.y = ns.y ~ i %}{% endfor %}{{ ns.x }}{{ ns.y }}", "{% if yes %}{% set z = 3 %}{% endif %}{{ z }}", "{% set a, b = 1, 2 %}{{ a }}{{ b }}", "{% set (a, b) = (b1, 2) %}{{ a }}{{ b }}", "{% set a = 1, 2 %}{{ a }}",
    "{% set t %}a{{ n }}\n{% endset %}[{{ t }}]{{ t | length }}", "{% set t | upper | trim %} ab {% endset %}[{{ t }}]", "{% filter upper %}a{{ word }}{% endfilter %}", "{% filter replace('a', 'b') | upper %}banana{% endfilter %}", "{% with a = 1, b = 2 %}{{ a + b }}{% endwith %}{{ a }}", "{% set x = 5 %}{% with x = x + 1 %}{{ x }}{% endwith %}{{ x }}",
    "{% macro f(a, b=2, c=a) %}{{ a }}{{ b }}{{ c }};{% endmacro %}{{ f(1) }}{{ f(1, 3) }}{{ f(1, c=9) }}{{ f(b=1, a=2) }}{{ f() }}", "{% macro f(x) %}{% if x > 0 %}{{ x }}{{ f(x - 1) }}{% endif %}{% endmacro %}{{ f(4) }}", "{% macro f() %}{{ varargs }}{{ kwargs }}{% endmacro %}{{ f(1, 2, a=3) }}",
    "{% macro f(x) %}[{{ caller() }}{{ x }}]{% endmacro %}{% call f(1) %}in {{ n }}{% endcall %}", "{% macro f(l) %}{% for x in l %}{{ caller(x) }}{% endfor %}{% endmacro %}{% call(y) f(list) %}<{{ y }}>{% endcall %}", "{% set g = 2 %}{% macro f() %}{{ g }}{{ n }}{% endmacro %}{% set g = 3 %}{{ f() }}", "{% macro f(a) %}{{ a }}{% endmacro %}{{ f(*[1]) }}{{ f(**{'a': 2}) }}", "{% macro m() %} x {% endmacro %}{{ m() | trim | length }}{{ m() ~ 'y' }}",
    "{% generation %}{{ n }}{% endgeneration %}!", "{% for x in list %}{{ loop.cycle('a', 'b') }}{{ loop.changed(x > 1) }}{% endfor %}", "{% if no %}a{% elif n == 7 %}b{% else %}c{% endif %}", "{% if no %}a{% elif no %}b{% else %}c{% endif %}", "{% if no %}{{ n | nofilter }}{% endif %}ok", "{{ 'x' if no else n is defined }}", "{{ (n | nofilter) if no else 1 }}",
    "{% for x in list %}{% else %}{% endfor %}.", "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m.content }}{% endfor %}", "{% for g in people | groupby('age') %}{{ g.grouper }}:{{ g.list | length }} {% endfor %}", "{% for a, b in [[1, 2], [3, 4]] %}{{ a * b }} {% endfor %}", "{% for a, (b, c) in [[1, [2, 3]]] %}{{ a }}{{ b }}{{ c }}{% endfor %}", "{{ n }}{{ x }}{{ nothing }}{{ undefined_name }}{{ yes }}",
    "{% set l = list | map('string') %}{{ l | join }}{{ l | join }}", "{{ {'a': {'b': {'c': 1}}}.a.b.c }}", "{{ {'a': 1}}}", "{% set messages = messages[1:] %}{{ messages | length }}", "{% for x in list -%}\n  {{ x }}\n{%- endfor %}", "{%- for x in list %}\n  {{- x }}\n{% endfor -%}\n\n end", "{{ 1 }}\n", "{{ 1 }}\n\n", "\n{{ 1 }}", "{{ list.0 }}{{ nested.0.1 }}", "",
    "{%if yes%}a{%endif%}{{n}}", "{% if(yes) %}a{% endif %}", "{% set x=(1,2)|list %}{{x}}", "{{ '{{' }}{{ '%}' }}", "{% if yes and\n   n %}a{% endif %}", "{{ caller is defined }}", "{{ loop is defined }}", "{% for x in undefined_name %}a{% else %}b{% endfor %}", "{% set x %}{% for i in list %}{{ i }}{% endfor %}{% endset %}{{ x }}", "{{ map.items() | list | length }}", "{{ (map.items() | list)[0][1] }}",
    "{% set ns = namespace() %}{% with a = 1 %}{% macro f() %}{{ n }}{% endmacro %}{% set ns.f = f %}{% endwith %}{{ ns.f() }}", "{% for x in list %}{% break %}{% else %}e{% endfor %}", "{% for x in list %}{% if x == 1 %}{% break %}{% endif %}{% else %}e{% endfor %}",
    "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.next() }}{{ c.current }}{{ c.reset() }}{{ c.next() }}", "{% set j = joiner() %}{% for x in list %}{{ j() }}{{ x }}{% endfor %}", "{% set j = joiner('|') %}{{ j() }}a{{ j() }}b",
    "{% for x in list %}{% set y = x %}{% endfor %}{{ y is defined }}", "{% for x in list %}{{ y }}{% set y = x %}{% endfor %}", "{% macro a() %}{% set q = 1 %}{{ q }}{% endmacro %}{{ a() }}{{ q }}", "{% for i in [1] %}{% macro h() %}{{ i }}{% endmacro %}{{ h() }}{% endfor %}", "{{ [1,2,3] | map('float') | sum }}", "{{ 'a' if undefined_name else 'b' }}", "{{ undefined_name or 'z' }}", "{{ not undefined_name }}",
]


FILTERS = set(ImmutableSandboxedEnvironment().filters)


def environment():
    class Generation(Extension):
        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return nodes.CallBlock(self.call_method("_generation"), [], [], body).set_lineno(line)

        def _generation(self, caller):
            return caller()

    class Dict:
        def __call__(self, *values, **named):
            return dict(*values, **named)

    class Namespace(utils.Namespace):
        def __init__(*values, **named):
            self, values = values[0], values[1:]
            attributes = dict(*values, **named)
            for name in attributes:
                Namespace._check(name)
            utils.Namespace.__init__(self, attributes)

        def __setitem__(self, name, value):
            Namespace._check(name)
            utils.Namespace.__setitem__(self, name, value)

        @staticmethod
        def _check(name):
            if name.startswith("_"):
                raise TemplateError("underscore")

    def raise_exception(message):
        raise TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"])
    env.filters["tojson"] = tojson
    env.globals.update(raise_exception=raise_exception, strftime_now=datetime.date.fromisoformat(DATE).strftime, dict=Dict(),
                       namespace=Namespace)
    return env


def rendered(template, values):
    try:
        return environment().from_string(template).render(**json.loads(json.dumps(values)))
    except Exception:  # Python's own errors, too, such as TypeError
        return None


def rows():
    """An expression may hold a bar, so a line of them is cut where what stands between two bars is one by itself."""
    templates = list(STATEMENTS)
    for line in EXPRESSIONS:
        parts, expression = line.split(" | "), ""
        for part in parts:  # a filter if the parts before it, and a bar, make an expression with it that renders
            longer = "{{ " + expression + " | " + part + " }}"
            filters = expression and part.split("(")[0].split(" ")[0].split("|")[0] in FILTERS
            expression = f"{expression} | {part}" if filters and rendered(longer, {**OWN, **VALUES}) is not None else part
            templates.append("{{ " + expression + " }}")
    for line in REFUSED:
        templates += line.split("|")
    return list(dict.fromkeys(templates))


# What a random program is made of: a word in angle brackets stands for any line below it. {S} and {E} begin and end a tag.
GRAMMAR = {kind: lines.strip("\n").split("\n") for kind, lines in {
    "number": r"""
n
x
list[0]
loop.index
words|length
17
2.5
-3
true
(<number> <plus> <number>)
(<number> <plus> <number>)
(-<number>)
<list>|length
(<number>)|<number filter>
(<number> if <test> else <number>)
<number> ** 2
<list>|<fold>""",
    "plus": "+\n-\n*\n//\n%\n/\n~",
    "fold": "sum\nfirst\nlast\nmax\nmin\ncount",
    "number filter": "abs\nround\nint\nfloat\nround(1)\nround(1, 'floor')\nround(0, 'ceil')\ndefault(3)\nint(5)",
    "text": r"""
word
text
lines
odd
html
people[0].name
'a b'
'Straße\n'
"it's %"
(<text> + <text>)
(<text> ~ <any>)
<text>|<text filter>
<text>|<text filter>
<text>[<slice>]
(<text>).<method>
(<text>).<method>
<text> * 2
<list>|join
<list>|join(', ')
('%s-%5.1f|%-4d' % (<text>, <number>, <number>))
'{} {:>4} {a}'.format(<text>, <text>, a=<any>)
<any>|tojson
<map>|tojson(indent=2)
<any>|string
(<text> if <test> else <text>)""",
    "text filter": "upper\nlower\ntitle\ntrim\ncapitalize\nreplace('e', 'E')\nreplace('o', '', 1)\nindent(2)\nindent(1, true)\ncenter(12)\n"
                   "truncate(9)\ntruncate(8, true, '~')\ndefault('-')\nreverse\ntrim('e')\nwordcount\nstring",
    "block filter": "upper\nlower\ntrim\ntrim('e')\nindent(2)\nreplace('e', 'E')\ntruncate(8, true, '~')\ndefault('-')",
    "method": "strip()\nlstrip()\nrstrip('e')\nsplit()\nsplit('e')\nsplit('n', 1)\nrsplit('n', 1)\nrsplit(none, 1)\nsplitlines()\n"
              "splitlines(true)\nstartswith('o')\nendswith(('\\n', 'h'))\nupper()\ntitle()\nfind('n')\ncount('e')\nreplace('n', 'NN')\n"
              "capitalize()\nisdigit()\nformat(1)\nremoveprefix('one')\nrfind('o')\njoin(['1', '2'])\nislower()\nisspace()\nnone()",
    "slice": "1:\n:2\n::-1\n-2:\n1:3\n::2\n:-1\n3:0:-1\n5:\n0\n-1",
    "list": r"""
list
words
nested
reals
people
[]
[1, 'a', none]
range(4)|list
(3, 1)
[[2, 'b'], [1, 'a']]
(<list> + <list>)
<list>|<list filter>
<list>|<list filter>
<list>[<slice>]
[<any>, <any>]
<text>|list
<map>.items()|list
<map>.keys()|list
(<text>).split()""",
    "list filter": "list\nsort\nunique|list\nreverse|list\nmap('string')|list\nmap('upper')|list\nselect|list\nreject('none')|list\n"
                   "batch(2)|list\nbatch(2, 0)|list\nslice(2)|list\nslice(3, '-')|list\nmap('length')|list\nselect('string')|list\n"
                   "map(attribute='name')|list\nselectattr('age', 'gt', 26)|list\nrejectattr('age', 'eq', 30)|list\ngroupby('age')\n"
                   "sort(reverse=true)\nsort(attribute='age')\nmap('default', 1)|list\nmap(attribute='age', default=0)|list",
    "map": "map\npeople[1]\nmessages[2]\nnested[1]\n{}\n{'a': 1}\n{1: 'x', 'k': [none]}\n{'a': <any>, <text>: <any>}\ndict(<map>, z=1)\n"
           "dict(a=<any>)",
    "map filter": "dictsort\ndictsort(by='value')\nitems|list\nlength\nlist\ntojson\nfirst\nlast",
    "any": r"""
nothing
yes
unknown
map.b
ns.a
v
k
<test>
<number>
<text>
<list>
<map>
(<test> and <any>)
(<any> or <any>)
<map>.a
<map>.name
<map>.get('a', <any>)
<list>[<number>]
<map>|<map filter>""",
    "test": "(<any> is <kind>)\n(<any> is not <kind>)\n(<any> == <any>)\n(<any> != <any>)\n(not <any>)\n(<number> < <number>)\n"
            "(<number> <= <number>)\n(<any> in <list>)\n(<text> not in <text>)",
    "kind": "defined\nundefined\nnone\nstring\nmapping\nsequence\niterable\nnumber\ninteger\nfloat\nboolean\ntrue\nfalse\nodd\neven\n"
            "divisibleby(3)\neq(7)\nne 'a'\ngt(2)\nlower\nupper\nin [1, 'a', none]\nsameas(none)\ncallable",
    "space": " \n\\n\n  a \\n\nb{# c #}\n\\n  \né ",
    "statement": r"""
<space>
<space>{{ <any> }}
<space>{{- <text> -}}
{{ <number> }}<space>
{{ <list> }}
{S}set v = <any>{E}
{S}set ns.a = <any>{E}
{S}if <test>{E}<statement>{S}endif{E}
{S}if <test>{E}<statement>{S}elif <test>{E}<statement>{S}else{E}<statement>{S}endif{E}
{S}for v in <list>{E}<statement>{{ loop.index0 }}{{ ',' if not loop.last }}{S}endfor{E}
{S}for v in <list> if v{E}<statement>{S}if <test>{E}{S}break{E}{S}endif{E}{S}else{E}<space>{S}endfor{E}
{S}for k, v in <map>.items(){E}<statement>{S}endfor{E}
{S}macro f(v, k=<any>){E}<statement>{S}endmacro{E}{{ f(<any>) }}{{ f(1, k=2)|trim }}
{S}set v{E}<statement>{S}endset{E}
{S}with k = <any>{E}<statement>{S}endwith{E}
{S}filter <block filter>{E}<statement>{S}endfilter{E}
{S}call(v) g(list){E}<statement>{S}endcall{E}"""}.items()}
BEGIN = "{% set ns = namespace(a=1) %}{% macro g(l) %}{% for x in l %}[{{ caller(x) }}]{% endfor %}{% endmacro %}"


def program(source, kind="statement", depth=5):
    """A random text of a kind. A few values have another kind than the one that is asked for."""
    if kind in ("number", "text", "list", "map") and source.random() < 0.03:
        kind = "any"
    lines = GRAMMAR[kind] if depth > 0 else [line for line in GRAMMAR[kind] if "<" not in line] or GRAMMAR[kind]
    text = re.sub(r"<([a-z ]+)>", lambda m: program(source, m[1], depth - 1), source.choice(lines).replace("\\n", "\n") if kind == "space" else
                  source.choice(lines))
    return re.sub(r"\{([SE])\}", lambda m: source.choice({"S": ["{% ", "{%- "], "E": [" %}", " -%}"]}[m[1]]), text)


def programs(count, first=0):
    """The same on every machine; small enough to be looked at."""
    for seed in range(first, first + 10 * count):
        source = random.Random(seed)
        text = BEGIN + "".join(program(source) for _ in range(source.randint(2, 6)))
        if len(text) < 500 and count:
            count -= 1
            yield text


def greek(value):
    """The same values in letters that no template has: each of them in a text came from outside."""
    if isinstance(value, dict):
        return {k: greek(v) for k, v in value.items()}
    if isinstance(value, list):
        return [greek(v) for v in value]
    letters = {ord(c): 0x3B1 + i % 17 for i, c in enumerate("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")}
    return value.translate(letters) if isinstance(value, str) else value


def main():
    out, made = [], list(programs(300))
    for template in rows() + made:
        text = rendered(template, {**OWN, **VALUES})
        if template in made or text is not None and " at 0x" not in text:
            out.append([template, text])
        elif any(template in line.split("|") for line in REFUSED):
            assert text is None, template
            out.append([template, None])
    (GOLDENS / "jinja.json").write_text(json.dumps(
        {"date": DATE, "own": OWN, "values": VALUES, "greek": greek(VALUES), "rows": []}, ensure_ascii=False)[:-2] + "\n" +
        ",\n".join(json.dumps(row, ensure_ascii=False) for row in out) + "]}\n")
    print(len(out), "templates,", sum(text is None for _, text in out), "refused")


if __name__ == "__main__":
    main()
