"""Draws one block of the model as data flow, with the kernels of infer.cu that compute it.

    python3 notebooks/block.py > notebooks/block.svg
"""
from html import escape

# Text between backquotes is a kernel of infer.cu; tests/test_notebooks.py looks for each.
BEFORE = ("`embed`", "x = embed[id]", "")
ATTENTION = (
    ("`norm`", "x / sqrt(mean(x²) + eps) · w", "for the matrix that reads it"),
    ("`product`", "q, k, v = W x + b", ""),
    ("`rope`", "turn q and k by position", "k and v go to the cache"),
    ("`attention`", "softmax(q·k, sink) · v", "heads of other sizes: `attention_any`"),
    ("`product`", "W_o attn + b, added to x", ""),
)
EXPERTS = (
    ("`norm`", "x / sqrt(mean(x²) + eps) · w", "for the router and the experts"),
    ("`product` → `route`", "top_k of W_r x + b, softmax", "and each expert's list of tokens"),
    ("`product`", "act(W_gate x, W_up x)", "of each chosen expert"),
    ("`product`", "W_down act + b", "of each chosen expert"),
    ("`combine`", "Σ weight · expert, added to x", ""),
)
AFTER = (("`norm` → `product`", "logits = W_head norm(x)", "of the tokens that want them"),
         ("`filter` → `draw`", "argmax(logits / T + noise)", "top-k, top-p, min-p if they are asked for"))

WIDTH, TRUNK, LEFT, BOX, ROW, HIGH = 800, 70, 150, 310, 58, 40
HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {0} {1}" width="{0}" height="{1}">
<style>text{{font:14px sans-serif;fill:#1d2733}}.k{{font:bold 14px monospace}}.f{{font:14px monospace}}
.n,.n .k{{font-size:12px;fill:#5b6875}}path,circle{{stroke:#44586c;stroke-width:1.6}}.x{{stroke-width:5}}</style>
<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="6" markerHeight="6" orient="auto">
<path d="M0 0L8 4L0 8z" fill="#44586c" style="stroke:none"/></marker></defs>
<rect width="100%" height="100%" fill="#fff"/>
"""
svg = []


def line(x1, y1, x2, y2, more=""):
    svg.append(f'<path d="M{x1} {y1}L{x2} {y2}" {more}/>')


def text(x, y, words, more=""):
    """Kernels in bold monospace."""
    parts = [f'<tspan class="k">{escape(part)}</tspan>' if i % 2 else escape(part)
             for i, part in enumerate(words.split("`"))]
    svg.append(f'<text x="{x}" y="{y}" {more}>{"".join(parts)}</text>')


def upright(x, y, words, style):
    text(x, y, words, f'class="{style}" text-anchor="middle" transform="rotate(-90 {x} {y:g})"')


def step(y, kernels, formula, note, color="#dbe7f4"):
    svg.append(f'<rect x="{LEFT}" y="{y}" width="{BOX}" height="{HIGH}" rx="6" fill="{color}" stroke="#7f93a8"/>')
    text(LEFT + BOX // 2, y + 25, kernels, 'text-anchor="middle"')
    text(LEFT + BOX + 18, y + 17, formula, 'class="f"')
    text(LEFT + BOX + 18, y + 34, note, 'class="n"')


def arrow(x1, y1, x2, y2):
    line(x1, y1, x2, y2, 'marker-end="url(#tip)"')


def half(y, name, steps, color):
    """From the residual stream, step by step, and back into it. Returns where the next half begins."""
    end = y + len(steps) * ROW + 6
    svg.append(f'<rect x="{LEFT - 40}" y="{y}" width="{WIDTH - LEFT + 30}" height="{end - y}" rx="10" fill="#f3f6f9"/>')
    upright(LEFT - 25, (y + end) / 2, name, "n")
    for i, one in enumerate(steps):
        step(y + 12, *one, color)
        middle = y + 12 + HIGH // 2
        if i == 0: arrow(TRUNK, middle, LEFT, middle)
        if i < len(steps) - 1: arrow(LEFT + BOX // 2, y + 12 + HIGH, LEFT + BOX // 2, y + 12 + ROW)
        y += ROW
    arrow(LEFT, middle, TRUNK + 10, middle)
    svg.append(f'<circle cx="{TRUNK}" cy="{middle}" r="10" fill="#fff"/>')
    line(TRUNK - 6, middle, TRUNK + 6, middle)
    line(TRUNK, middle - 6, TRUNK, middle + 6)
    return end + 14


def draw():
    step(12, *BEFORE, color="#e4e9ee")
    arrow(LEFT, 32, TRUNK, 32)
    begin = half(74, "attention", ATTENTION, "#dbe7f4")
    end = half(begin, "experts", EXPERTS, "#dff0e0")
    height = end + len(AFTER) * ROW + 10
    trunk = end + 12 + HIGH // 2
    arrow(TRUNK, trunk, LEFT, trunk)
    for i, one in enumerate(AFTER):
        step(end + 12 + i * ROW, *one, color="#e4e9ee")
    arrow(LEFT + BOX // 2, end + 12 + HIGH, LEFT + BOX // 2, end + 12 + ROW)
    upright(22, (74 + end) / 2, "x, the residual stream, (tokens, dim) in fp32", "f")
    upright(46, (74 + end) / 2, "both halves once a layer", "n")
    cache = 74 + 12 + 2 * ROW + HIGH + 9  # between storing keys and values, and attention
    text(LEFT + BOX // 2 + 10, cache + 4, "the cache: keys and values, pages of 64 positions", 'class="n"')
    return HEAD.format(WIDTH, height) + f'<path class="x" d="M{TRUNK} 32V{trunk}"/>\n' + "\n".join(svg) + "\n</svg>"


if __name__ == "__main__":
    print(draw())
