"""Makes tests/goldens: what others compute, in a form C can read (SOURCES.md there says where each file comes from).

    TEST_DATA=DIR python tests/make_goldens.py          (or DIR as the argument)
    needs: pip install tokenizers; Python 3.11, whose unicodedata knows Unicode 14

Tokenizer goldens are lines {"text", "ids"}: ids by the `tokenizers` library with control tokens as ordinary text
(encode_special_tokens) and without the file's template. "control_ids", if there: control tokens recognised.
"template_ids", if there: with the template (a token in front; the first 40 lines show it). Only code points that
Unicode 14 assigns occur, since regular expression engines differ in their age, and no U+0000, which ends a C string.
"""
import json
import os
import random
import struct
import sys
import tarfile
import unicodedata
import zlib
from collections import defaultdict
from pathlib import Path

from tokenizers import Tokenizer

GOLDENS = Path(__file__).parent / "goldens"
SEED = 11

SPACES = ["\t", "\n", "\v", "\f", "\r", "\r\n", " ", "  ", "   ", "\x85", "\xa0", "\u1680", "\u180e", "\u2000",
          "\u2003", "\u2009", "\u200a", "\u200b", "\u2028", "\u2029", "\u202f", "\u205f", "\u2060", "\u3000", "\ufeff"]
MARKS = ["\u0301", "\u0308", "\u0327", "\u0338", "\u05b0", "\u064b", "\u093e", "\u094d", "\u0e31", "\U0001e944",
         "\u20dd", "\u3099", "\ufe0f", "\u1cd0", "\u0488"]
EMOJI = ["😀", "👍🏽", "👩‍🚀", "👨‍👩‍👧‍👦", "🏳️‍🌈", "🇫🇷🇯🇵", "1️⃣", "❤️", "☃", "🏴󠁧󠁢󠁥󠁮󠁧󠁿", "🤷🏿‍♀️"]
CONTROL = ["<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>",
           "<|message|>", "<|call|>", "<|endofprompt|>", "<|reserved_200000|>", "<|reserved_200017|>"]
WORDS = """I you don't can't I'll WE'VE they'd He's it'S rock'n'roll O'Brien l'été d'accord naïve café Straße ΑΒΓ αβγ
 Привет МОСКВА iPhone HTTPServer parseJSON x_y snake_case kebab-case CamelCaseWord mañana ǅ ŉ ﬁne ªº Ⅷ ② ½ ４２ ٣٤ 〇 東京
 日本語 中文 한국어 العربية עברית हिन्दी ไทย தமிழ் ქართული አማርኛ ᏣᎳᎩ 𝒳𝟙 𐍈 𠀀 İstanbul ıI ſ K""".split()
PUNCTUATION = list(".,;:!?'\"()[]{}<>/\\|@#$%^&*-_+=~`§¶•…—–“”‘’«»¿¡€£¥₹°±×÷≠≤∞√∑→⇒│█♪、。「」")
PUNCTUATION += ["//", "...", "!?", "\\n", "*/"]
SENTENCES = """The quick brown fox jumps over the lazy dog.
Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.
Portez ce vieux whisky au juge blond qui fume.
El pingüino Wenceslao hizo kilómetros bajo exhaustiva lluvia.
À noite, vovô Kowalsky vê o ímã cair no pé do pinguim.
Pchnąć w tę łódź jeża lub ośm skrzyń fig.
Příliš žluťoučký kůň úpěl ďábelské ódy.
Flygande bäckasiner söka hwila på mjuka tuvor.
Törkylempijävongahdus.
Árvíztűrő tükörfúrógép.
Pijamalı hasta yağız şoföre çabucak güvendi.
Ταχίστη αλώπηξ βαφής ψημένη γη.
Съешь ещё этих мягких французских булок, да выпей чаю.
Жебракують філософи при ґанку церкви в Гадячі.
Ах чудна българска земьо, полюшвай цъфтящи жита.
Բարեւ աշխարհ։
გამარჯობა მსოფლიო!
דג סקרן שט בים מאוכזב ולפתע מצא חברה.
نص حكيم له سر قاطع وذو شأن عظيم.
سلام دنیا، حالِ شما چطور است؟
नमस्ते दुनिया। आप कैसे हैं?
ওহে বিশ্ব, কেমন আছো?
வணக்கம் உலகம்!
హలో ప్రపంచం.
ഹലോ ലോകം.
සුභ දවසක්.
สวัสดีชาวโลก สบายดีไหม
ສະບາຍດີ ຊາວ ໂລກ
မင်္ဂလာပါ ကမ္ဘာလောက။
សួស្តី​ពិភពលោក
བཀྲ་ཤིས་བདེ་ལེགས།
ሰላም ልዑል!
いろはにほへと ちりぬるを。カタカナも、漢字も。
天地玄黃，宇宙洪荒。日月盈昃，辰宿列張。
你好，世界！今天是2025年6月28日。
다람쥐 헌 쳇바퀴에 타고파.
Xin chào thế giới, tôi là người Việt Nam.
Selamat pagi dunia, apa kabar?
Habari ya dunia; Ẹ n lẹ́ o ayé.
Сайн байна уу, дэлхий. ᠰᠠᠢᠨ ᠪᠠᠢᠨ᠎ᠠ ᠤᠤ""".split("\n")
CODE = ["int main(void) { return 0; }", "for (int i = 0; i < n; i++)\n\ta[i] += b[i]*c[i];",
        "#include <stdio.h>\r\n\r\n", "def f(x):\n    return x**2 if x>0 else -x\n",
        "SELECT * FROM t WHERE a='it''s' AND b>=1e-9;", "{\"key\": [1, 2.5, null], \"nested\": {\"a\\n\": true}}",
        "<a href=\"https://example.org/?q=1&r=%20\">x</a>", "// comment\n/* block */\n", "    \t  mixed\tindent",
        "git commit -m 'fix: #42'", "$HOME/.cache/x-y_z.tar.gz", "fn main() { println!(\"{:?}\", vec![1u8; 3]); }",
        "\\begin{align} x^2 &= \\frac{1}{2} \\\\ \\end{align}", "| a | b |\n|---|---|\n| 1 | 2 |",
        "0x1F600 0b1010 1_000_000 3.14159e-10", "a=>b??c?.d!==e;", "<?php echo $x; ?>",
        "http://user:pw@host:8080/p/a/t/h?x=y#z", "C:\\Users\\me\\file.txt", "-----BEGIN-----\n=====\n_____"]
EDGES = ["", " ", "\n", "\n\n\n", "\r\n\r\n", " \n \n ", "a ", " a", "  a", "a  b", "a\n", "a\n\nb", "a \n b", "\ta",
         "a\t\tb", " \t \ta", "a" * 500, " " * 300, "\n" * 100, "ab" * 200, "1" * 100, "é" * 120, "漢" * 120, "=" * 200,
         "\u0301" * 60, "😀" * 40, "1 12 123 1234 12345 123456 1234567", "1,234,567.89", "12a34b", "A1b2C3", "don't",
         "DON'T", "don’t", "it'S", "it'ſ", "I'Ll I'LL I'll", "'s's's", "''s", "x'", "'re'", "a's\nb'd",
         "s'il vous plaît", "aB", "Ab", "AB", "ABc", "ABcD", "aBC", "ÀÉî", "ǅungla", "ǆ", "ʰa", "Aʰ", "a\u0301b",
         "A\u0301B", "\u0301a", "1\u0301", "\u180ea", "a\u180e\u180eb", " \u180e ", "\u180e\n", "a\u200db", "a\u00adb",
         "\ufeffa", "e\u0301 é", "\u1100\u1161\u11a8 각", "½ ² Ⅷ ①", "٠١٢٣ ०१२३ 〇一二三", "a\x85b", "a\x85\x85 b",
         "a\xa0\xa0b", "a\u2028b", "a\u2029 b", "a\u3000b", "\u3000\u3000", "x\v\fy", "a\rb", "a\r\n b", "...\n",
         "!!\r\n//", "/\n/", " //\n", "a/b/c", "?!\n\n\n", "-\n-", "\\r\\n", "\x01\x02\x1b[0m", "\x7f", "\ufffd",
         "\ue000", "<|", "|>", "<||>", "<|end", "<|end|", "<|END|>", "< |end|>", "<|unknown|>"]


def assigned_by_script():
    """Code points that Unicode 14 assigns, by the first word of their name: LATIN, CJK, HANGUL, ..."""
    assert unicodedata.unidata_version == "14.0.0", "run this with Python 3.11, whose unicodedata decides"
    scripts = defaultdict(list)
    for c in map(chr, range(1, 0x110000)):
        if unicodedata.category(c) not in ("Cn", "Cs", "Co"):
            scripts[unicodedata.name(c, "CONTROL").split()[0].split("-")[0]].append(c)
    return scripts


def texts(data):
    rng = random.Random(SEED)
    pick = rng.choice

    def some(low, high, make):
        return "".join(make() for _ in range(rng.randint(low, high)))

    yield from EDGES + SENTENCES + CODE + CONTROL
    scripts = assigned_by_script()
    for chars in scripts.values():
        yield some(1, 6, lambda: pick(chars)) + pick(["", " ", "\n"]) + some(3, 3, lambda: pick(chars))
    big = [chars for chars in scripts.values() if len(chars) >= 40]
    for _ in range(350):
        chars = pick(big)
        yield some(3, 3, lambda: pick(["", " ", " ", "\u0301"]) + some(1, 5, lambda: pick(chars)))
    for _ in range(150):
        yield some(2, 8, lambda: pick(pick(big)))
    for _ in range(250):
        yield pick(["", "a", "Z", "7", ".", "漢"]) + some(1, 5, lambda: pick(SPACES)) + pick(["", "b", "9", "!", "é"])
    for _ in range(150):
        yield some(1, 3, lambda: pick(WORDS) + pick(MARKS) * rng.randint(0, 2) + pick(["", " "]))
    for _ in range(150):
        yield some(3, 3, lambda: str(rng.randrange(10 ** rng.randint(1, 9))) + pick([" ", ".", ",", "", "a", "-"]))
    for _ in range(100):
        yield some(1, 3, lambda: pick(EMOJI) + pick(["", " ", "a", "!", "\u200d", "\ufe0f"]))
    endings = ["s", "S", "t", "T", "re", "RE", "ve", "Ve", "m", "ll", "lL", "d", "D", "x", "sT"]
    for _ in range(150):
        word = pick(WORDS)
        yield (pick(["", " ", "'", "\""]) + pick([word, word.upper(), word.title()]) + pick(["'", "’"]) + pick(endings)
               + pick(["", " ", "n", "é", "1"]))
    for _ in range(100):
        yield pick(["", "a", " "]) + pick(CONTROL) + pick(["", " ", "user", "assistant", "\n"]) + pick(CONTROL + [""])
    for _ in range(100):
        yield pick(CODE)[:rng.randint(3, 30)] + pick(PUNCTUATION) + pick(WORDS)
    kinds = [SPACES, MARKS, EMOJI, WORDS, WORDS, PUNCTUATION, PUNCTUATION, ["0", "12", "345", "2025"], [" ", " ", "\n"]]
    for _ in range(350):
        yield some(2, 9, lambda: pick(pick(kinds)))
    lines = [line for line in (data / "text" / "tinyshakespeare.txt").read_text().split("\n") if line]
    yield from rng.sample(lines, 250)
    for _ in range(20):
        start = rng.randrange(len(lines) - 3)
        yield "\n".join(lines[start:start + 3]) + "\n"


def write_lines(name, rows):
    with open(GOLDENS / name, "w", newline="\n") as f:
        f.writelines(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n" for row in rows)
    print(f"{name}: {len(rows)} strings")


def write_json(name, value):
    (GOLDENS / name).write_text(json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n")


def encode(tokenizer, text):
    def ids(control, template=False):
        tokenizer.encode_special_tokens = not control
        return tokenizer.encode(text, add_special_tokens=template).ids

    row = {"text": text, "ids": ids(control=False)}
    if ids(control=True) != row["ids"]:
        row["control_ids"] = ids(control=True)
    if ids(control=False, template=True) != row["ids"]:
        row["template_ids"] = ids(control=False, template=True)
    return row


def tokenizer_strings(data):
    tokenizer = Tokenizer.from_file(str(data / "gpt-oss-20b" / "tokenizer.json"))
    write_lines("tokenizer_strings.jsonl", [encode(tokenizer, text) for text in dict.fromkeys(texts(data))])


def small_tokenizer_strings(data, model):
    """Control tokens, edge cases and a selection of the rest, all short. The template is one token in front."""
    tokenizer = Tokenizer.from_file(str(data / "models" / model / "tokenizer.json"))
    names = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    short = [t for t in dict.fromkeys(texts(data)) if len(t.encode()) <= 48]
    chosen = [t for name in names for t in (name, f"a{name}b", f" {name} {name}c")]
    chosen += short[:100] + short[100::(len(short) - 100) // 200]
    rows = [encode(tokenizer, text) for text in chosen]
    assert all(row["template_ids"] == [1] + row["ids"] for row in rows)
    for row in rows[40:]:
        del row["template_ids"]
    write_lines(f"tokenizer_strings_{model}.jsonl", rows)


FAMILY_TEXTS = [
    "", "<think>", "</think>x", "a <tool_call>{}", "[INST] Hi [/INST]", "[INST]Hi[/INST]x", "<s>[INST]Hi", "<bos>a", "▁▁a ▁b", " ▁a",
    " a", "  a", "e\u0301", "\u1100\u1161\u11a8", "\u212b \u2126 \ufb01 ①", "\u1e0b\u0323 q\u0307\u0323", "a\u0315\u0300\u05ae\u0062",
    "\u0958\u095b \u2adc \uac00\u11a8", "12345 ١٢٣ Ⅷ½ 三", "<h1>x</h1>", "<0x0A>", "<｜User｜>hi<｜Assistant｜>", "<start_of_turn>user\n",
    "<|im_start|>user\nHi<|im_end|>\n", "<|eot_id|>", "</s>\n", "\n" * 40, "\t\t\t", " " * 50 + "x", "x" + " " * 50]


def family_strings(archive):
    """Of each family's tokenizer only checksums of the ids: as text, and with control tokens and template."""
    short = [t for t in dict.fromkeys(texts(archive.parent)) if len(t.encode()) <= 48]
    rows = [{"text": text} for text in FAMILY_TEXTS + short[:60] + short[60::(len(short) - 60) // 240]]
    with tarfile.open(archive) as tar:
        for member in sorted((m for m in tar if m.name.endswith("/tokenizer.json")), key=lambda m: m.name):
            tokenizer = Tokenizer.from_str(tar.extractfile(member).read().decode())
            for row in rows:
                for key, control in (("text_ids", False), ("ids", True)):
                    tokenizer.encode_special_tokens = not control
                    ids = tokenizer.encode(row["text"], add_special_tokens=control).ids
                    sums = row.setdefault(key, {})
                    sums[member.name.split("/")[1]] = zlib.crc32(json.dumps(ids).encode())
    write_lines("tokenizer_strings_families.jsonl", rows)


def templates():
    """The parrot with tokens before the text, behind it, and both: ids with control tokens and template. A template's names
    are those of special_tokens; their ids need not be added tokens."""
    tokenizer, out = json.loads((GOLDENS.parent / "fixtures" / "parrot" / "tokenizer.json").read_text()), []
    added = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    ids = {**{name: [id] for name, id in added.items()}, "[EOS]": [added["<|end|>"]], "a": [64], "[ENDS]": [65, added["<|end|>"]]}
    for before, behind in ((["<|start|>"], []), ([], ["<|end|>"]), (["<|start|>"], ["<|end|>"]), (["<|end|>"], ["<|end|>"]),
                           (["<|start|>", "<|start|>"], ["<|end|>", "<|start|>"]), ([], ["[EOS]"]), (["<|start|>"], ["a"]),
                           (["[ENDS]"], ["[ENDS]", "[EOS]"])):
        special = {name: {"id": name, "ids": ids[name], "tokens": [name] * len(ids[name])} for name in [*before, *behind]}
        single = [*before, None, *behind]
        template = {"type": "TemplateProcessing", "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                    "single": [{"SpecialToken": {"id": name, "type_id": 0}} if name else {"Sequence": {"id": "A", "type_id": 0}}
                               for name in single],
                    "special_tokens": special}
        made = Tokenizer.from_str(json.dumps({**tokenizer, "post_processor": template}))
        out.append({"name": f"{' '.join(before)} {' '.join(behind)}", "post_processor": template,
                    "ids": {text: made.encode(text).ids for text in ("", "Hello!", "a<|end|>", "<|start|> ")}})
    write_json("templates.json", out)


def bf16(values):
    """The shortest decimals that round to the same bf16 values."""
    def rounded(x):
        bits = struct.unpack("<I", struct.pack("<f", x))[0]
        return (bits + 0x7fff + (bits >> 16 & 1)) >> 16

    short = [next(s for s in (float(f"{v:.{n}g}") for n in range(1, 5)) if rounded(s) == rounded(v)) for v in values]
    return [int(s) if s == int(s) else s for s in short]


def layer0(data):
    """What the published weights give in layer 0 for the last token of a prompt; four of the heads."""
    source = json.load(open(data / "gpt-oss-20b" / "references" / "layer0_reference.json"))
    v = {name: x["values"] for name, x in source["vectors"].items()}
    out = {"model": source["model"], "source": source["source"], "token_index": source["token_index"],
           "input_token_ids": source["input_token_ids"], "router_logits": bf16(v["router_logits"]),
           "experts": source["topk"]["experts"], "expert_logits": bf16(source["topk"]["logits"]),
           "expert_weights": bf16(source["topk"]["weights"])}
    for name in ("hidden_after_attn", "mlp_norm", "expert30_mlp1", "expert30_swiglu", "expert30_mlp2_before_bias",
                 "mlp_out", "hidden_after_mlp"):
        out[name] = bf16(v[name])
    out["selected_expert_outputs"] = [bf16(v["selected_expert_outputs"][i * 2880:(i + 1) * 2880]) for i in range(4)]
    out["heads"] = [{"head": h, "qk_scaled_pre_mask": bf16(v["qk_scaled_pre_mask"][h * 74:(h + 1) * 74]),
                     "sink": bf16(v["qk_masked_with_sink"][h * 75 + 74:(h + 1) * 75])[0],
                     "attn_probs_with_sink": bf16(v["attn_probs_with_sink"][h * 75:(h + 1) * 75]),
                     "attn_weighted_v": bf16(v["attn_weighted_v"][h * 64:(h + 1) * 64])} for h in (0, 7, 8, 63)]
    write_json("layer0.json", out)


def greedy(data):
    """Prompts in harmony and the first eight tokens of the published weights."""
    source = json.load(open(data / "gpt-oss-20b" / "references" / "greedy_harmony_parity_full.json"))
    write_json("greedy.json", {
        "model": source["model"], "oracle": source["official_oracle"], "source": source["source"],
        "prompts": [{"name": s["id"], "text": s["prompt_text"], "ids": s["prompt_token_ids"],
                     "greedy_ids": s["official_greedy_tokens"]} for s in source["scenarios"]]})


def small_model(data, model):
    """Greedy ids, and the logits that gave the last of them, computed in double precision."""
    source = json.load(open(data / "models" / model / "reference_greedy.json"))
    write_json(f"{model}.json", {k: source[k] for k in ("prompt", "prompt_ids", "greedy_ids")} | {
        "last_logits": [float(f"{x:.7g}") for x in source["logits_before_last_token"]]})


def main():
    data = Path(sys.argv[1] if len(sys.argv) > 1 else os.environ["TEST_DATA"])
    GOLDENS.mkdir(exist_ok=True)
    tokenizer_strings(data)
    for model in ("TinyStories-656K", "stories260K"):
        small_tokenizer_strings(data, model)
        small_model(data, model)
    family_strings(data / "families.tar.xz")
    templates()
    write_json("harmony_cases.json", json.load(open(data / "harmony" / "harmony_cases.json")))
    layer0(data)
    greedy(data)


if __name__ == "__main__":
    main()
