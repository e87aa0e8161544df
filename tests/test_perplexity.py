"""`infer perplexity` against transformers, window by window, and what it refuses."""
import json

from helpers import TESTS, expect, infer, refused, same

NEEDS = ("commands", "families")  # rooms

GOLDEN = json.loads((TESTS / "goldens" / "perplexity.json").read_text())


def test_equals_transformers(folder):
    """Within 1e-4; with windows that overlap, and one that holds all; from a file and from stdin."""
    (folder / "text").write_text(GOLDEN["text"])
    for i, c in enumerate(GOLDEN["cases"]):
        out = infer("perplexity", TESTS.parent / c["model"], "-f", "-" if i % 2 else folder / "text", "--ctx", c["ctx"],
                    "--stride", c["stride"], stdin=GOLDEN["text"], seconds=300).text.split()
        found, tokens = float(out[1]), int(out[5])
        same(tokens, c["tokens"], f"tokens, {c['model']}")
        expect(abs(found / c["perplexity"] - 1) < 1e-4, f"{c}: {found}")


def test_refuses(folder):
    (folder / "short").write_text("a")
    (folder / "bad").write_bytes(b"a\xff")
    (folder / "text").write_text(GOLDEN["text"])
    tiny = TESTS.parent / "models" / "tiny"
    for options, code, word in (((), 2, "-f FILE"), (("-f", folder / "none"), 2, "none"),
                                (("-f", folder / "short"), 2, "two tokens"), (("-f", folder / "bad"), 2, "UTF-8"),
                                (("-f", folder / "short", "--ctx", "1"), 2, "from 2"),
                                (("-f", folder / "short", "--ctx", "x"), 2, "'x'"),
                                (("-f", folder / "text", "--ctx", "64", "--stride", "64"), 2, "stride of 64"),
                                (("-f", folder / "text", "--ctx", "5000"), 2, "4096")):
        refused("perplexity", tiny, *options, code=code, words=[word])
