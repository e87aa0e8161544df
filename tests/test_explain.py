"""`infer explain` against transformers' numbers: the probability of each token of small models, what else was likely, and
the experts of each layer."""
import html
import json
import math
import re

from helpers import FIXTURES, PARROT, Terminal, copy_model, each, expect, has, infer, refused, same
from test_logits import WITH_GOLDENS, as_option, golden, goldens

NEEDS = ("commands",)  # rooms

SHOWN = 4  # tokens expected in place of one
DOTS = ((1, 8), (2, 16), (4, 32), (64, 128))


def read_grid(lines, shared=1):
    """Experts of each layer."""
    layers = []
    for line in lines:
        cells = [ord(c) - 0x2800 for c in line]
        layers += [[2 * i + side for i, cell in enumerate(cells) for side in (0, 1) if cell & DOTS[row][side]]
                   for row in range(4)]
    return layers


def places(text):
    """Of each token: its id, probability in percent, bits, what was expected [(percent, id)], and its grid's lines."""
    found = []
    for line in text.splitlines():
        if head := re.match(r"(?:the first token: +| *([\d.]+) % +([\d.]+) bits  ).*?  (\d+):", line):
            found.append((int(head[3]), head[1], head[2], [], []))
        else:
            grid, percent, token = re.fullmatch(r"([\u2800-\u28ff]*)(?: +([\d.]+) % (.*))?", line).groups()
            if percent:
                found[-1][3].append((percent, token))
            if grid:
                found[-1][4].append(grid)
    return found


def test_has_transformers_probabilities_and_experts():
    def check(fixture):
        ids, (n, vocab), logits = golden(fixture)
        stages = goldens(fixture)
        found = places(infer("explain", FIXTURES / fixture, *as_option(ids)).text)
        same([f[0] for f in found], list(ids), "ids")
        same(found[0][1:4], (None, None, []), "the first token")
        for t in range(1, n):
            row = logits[(t - 1) * vocab:t * vocab]
            all_ = max(row) + math.log(sum(math.exp(x - max(row)) for x in row))
            best = sorted(range(vocab), key=lambda i: -row[i])[:SHOWN]
            _, percent, bits, expected, _ = found[t]
            expect(abs(float(percent) - 100 * math.exp(row[ids[t]] - all_)) < 0.011, f"probability {t}: {percent}")
            expect(abs(float(bits) - (all_ - row[ids[t]]) / math.log(2)) < 0.06, f"bits {t}: {bits}")
            same([token for _, token in expected], [f"({i})" for i in best], f"expected in place of {t}")
            for (percent, _), i in zip(expected, best):
                expect(abs(float(percent) - 100 * math.exp(row[i] - all_)) < 0.011, f"alternative {t}: {percent}")
        for name, (shape, experts) in stages.items():
            if name.endswith(".experts"):
                layer, k = int(name.split(".")[1]), shape[-1]
                for t in range(n):
                    same(read_grid(found[t][4])[layer], sorted(experts[t * k:(t + 1) * k]), f"experts of {t} in {name}")
        same(any(f[4] for f in found), any(name.endswith(".experts") for name in stages), "there is a grid")
    each([(fixture,) for fixture in WITH_GOLDENS], check)


def test_shows_bytes():
    """Of what has no characters, and of characters that several tokens make."""
    text = "a <b>é\n\x1b[31m"
    found = infer("explain", PARROT, "-p", text).text
    expect("\x1b" not in found, "an escape sequence")
    shown = bytes(int(byte, 16) for line in found.splitlines() if re.search(r"bits|first", line)
                  for byte in re.search(r"\d+:((?: [0-9A-F]{2})+)$", line)[1].split())
    same(shown, text.encode(), "bytes of all tokens")


def test_terminal_and_no_color():
    """Colours are for a terminal without NO_COLOR; the rows are the same."""
    for columns, more, colours in ((80, {}, True), (40, {}, True), (80, {"NO_COLOR": "1"}, False)):
        with Terminal("explain", PARROT, "-p", "Hello <", columns=columns, **more) as t:
            same(t.ended(), 0, "exit code")
            same(b"\x1b[3" in t.raw, colours, f"colours with {columns} columns and {more}")
            expect("first token" in t.text() and "surprise in bits" in t.text(), t.text())
            wide = [line for line in t.text().splitlines() if len(line) > columns and len(line.split()) > 2]
            expect(not wide or not has("terminal"), f"{columns} columns: {wide}")
    expect("surprise in bits" not in (r := infer("explain", PARROT, "Hello <")).text + r.err, "a legend in a pipe")


def test_page(folder):
    """It holds what the terminal shows, and nothing in it is markup that the text brought along."""
    text, page = "<script>alert(1)</script> &amp; \"x\" <b>", folder / "page.html"
    r = infer("explain", PARROT, "-p", text, "-o", page)
    same(r.out, b"", "stdout")
    content = page.read_text()
    same(sorted(set(re.findall(r"<(\w+)", content))), ["b", "h1", "meta", "p", "pre", "style", "title"], "elements")
    same("".join(html.unescape(b) for b in re.findall(r"<b>(.*?)</b>", content)), text.replace(" ", "␣"), "the text")
    same([html.unescape(x) for x in re.findall(r"<(?:title|h1)>(.*?)</", content)], [f"{PARROT} reads: {text}"] * 2, "titles")
    expect("surprise in bits" in content and "a dot is an expert" in content, "no legend")
    expect("color-scheme:light dark" in content and "#fff" not in content, "not for dark pages")
    plain = infer("explain", PARROT, "-p", text).text
    percent = re.findall(r"([\d.]+) %", plain)
    same(re.findall(r"([\d.]+) %", re.sub(r"<style>.*</style>", "", content, flags=re.S)), percent, "percentages")
    expect(not re.search(r"src=|href=|url\(|@import", content), "the page asks for something else")


def test_page_of_hostile_tokens(folder):
    """A tokenizer whose token is markup."""
    model = copy_model(PARROT, folder)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    added = tokenizer["added_tokens"][-1]
    name, added["content"] = added["content"], "<img src=x onerror=alert(1)>"
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    infer("explain", model, "--ids", added["id"], "-o", folder / "page.html")
    content = (folder / "page.html").read_text()
    expect("<img" not in content and "img" in content, f"{name} is {content[-200:]!r}")


def test_wrong_options(folder):
    each([(" ".join(map(str, options))[:30], options, code, words) for options, code, words in (
        ([], 2, ["-p", "--ids"]), (["-p", ""], 2, ["empty"]), (["--ids", "448"], 2, ["448"]),
        (["--ids", "1," * 513], 2, ["513", "512"]), (["--ids", 1, "-o", folder / "none" / "x"], 1, ["none/x"]),
        (["--ids", 1, "-o", "/dev/full"], 1, ["/dev/full", "disk full"]))],
        lambda name, options, code, words: refused("explain", PARROT, *options, words=words, code=code))
    same(infer("explain", PARROT, "--ids", 5).text.count(":"), 2, "one token, and nothing before it")
