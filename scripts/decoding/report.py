"""The readable result, for a terminal of 80 columns or a file."""

import math

import rich.text
from rich import console as rich_console
from rich import table

from scripts import reporting
from scripts.decoding import compare, request, result, text
from scripts.decoding import options as options_lib
from treewy_jax import memory
from treewy_jax import tree as tree_lib

BAR = 40
UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def show(
    found: result.Result,
    asked: request.Request,
    options: options_lib.Options,
    console: rich_console.Console,
) -> None:
    """Print text, acceptance, time, memory, the last tree, and what ran."""
    if not options.stream:
        _texts(found, asked, console)
    console.print()
    _acceptance(found, asked, console)
    if found.plain is not None:
        _comparison(found.plain, asked, console)
    console.print()
    console.print(_memory(found, asked, options))
    console.print()
    _last_tree(found, asked, console)
    console.print()
    console.print(f"{asked.verify}; device: {reporting.device()}", markup=False)


def _texts(found, asked, console) -> None:
    rows = found.generation.token_ids
    for number, ids in enumerate(rows, 1):
        if len(rows) > 1:
            console.rule(f"prompt {number}", align="left", style="dim")
        written = text.printable(text.decode(asked.model.tokenizer, ids))
        # A file gets the text's own lines; a terminal breaks them between words.
        console.print(written, markup=False, soft_wrap=not console.is_terminal)


def _acceptance(found, asked, console) -> None:
    """Print the histogram, the mean accept length, and the speed."""
    counts = result.histogram(found.generation, asked)
    most = max(counts.values())
    console.print("tokens a target pass, how often", style="bold")
    for length, count in counts.items():
        bar = "█" * math.ceil(BAR * count / most) if count else ""
        console.print(f"  {length:>3}  [green]{bar:<{BAR}}[/] {count:>6}")
    cut = sum(found.generation.cut)
    left_out = f", {cut} cut short left out" if cut else ""
    passes = sum(map(len, found.generation.accept_lengths))
    mean = found.generation.mean_accept_length
    console.print(f"  mean accept length {mean:.2f} ({passes} passes{left_out})")
    console.print(
        f"  {found.tokens} tokens in {found.seconds:.1f} s, compilation included: "
        f"{found.tokens_per_second:.1f} tokens a second"
    )


def _comparison(plain: result.Plain, asked, console) -> None:
    tokens = sum(map(len, plain.generation.token_ids))
    passes = sum(map(len, plain.generation.accept_lengths))
    if not plain.differences:
        console.print(
            f"  [green]equal[/]: decoding without drafts writes the same {tokens} "
            f"tokens, in {passes} passes"
        )
    for row, index, token, plain_token, gap in plain.differences:
        ours, theirs = (
            "the end" if t is None else text.label(asked.model.tokenizer, t)
            for t in (token, plain_token)
        )
        near = gap <= compare.NEAR_TIE
        verdict = "a near tie, which rounding decides" if near else "not a near tie"
        line = rich.text.Text("  different", style="yellow" if near else "bold red")
        line.append(
            f": prompt {row + 1}, new token {index + 1} is {ours}, without drafts "
            f"{theirs}; top-2 logit gap {gap:.2g}: {verdict}",
            style="default not bold",
        )
        console.print(line)


def _memory(found, asked, options) -> table.Table:
    """Return the table of state bytes, a column a scheme."""
    schemes = result.state_bytes(found.generation, asked, options.commit)
    used = options.commit.replace("_", "-")
    shown = table.Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column(f"decode state, {asked.tree.n_max} nodes")
    for scheme in schemes:
        how = "as allocated" if scheme == used else "computed"
        shown.add_column(f"{scheme}\n{how}", justify="right", min_width=12)
    kinds = {"recurrent": asked.state_dtype, "records": "until commit"}
    for part in found.generation.state_bytes:
        note = kinds.get(part, asked.dtype)
        sizes = [size(parts[part]) for parts in schemes.values()]
        shown.add_row(f"  {part.replace('_', ' ')} [dim]({note})[/]", *sizes)
    totals = [size(sum(parts.values())) for parts in schemes.values()]
    shown.add_row("  total", *totals, style="bold")
    held = [memory.blocks(asked.tree, scheme) for scheme in schemes]
    numbers = [str(blocks.allocated) for blocks in held]
    shown.add_row("  states a layer, prompt", *numbers)
    return shown


def _last_tree(found, asked, console) -> None:
    """Draw the tree verified last with its path, of the first row that took a step."""
    tokenizer, generation = asked.model.tokenizer, found.generation
    drawn = ((row, tree) for row, tree in enumerate(generation.last_tree) if tree[2])
    row, (tokens, parents, path) = next(drawn, (0, ([], [], [])))
    if not path:
        console.print("no tree was verified: the prompt's own token ended the text")
        return
    labels = [text.label(tokenizer, token) for token in tokens]
    for node in path:
        labels[node] += " ✓"
    prompt = f", prompt {row + 1}" if len(generation.last_tree) > 1 else ""
    console.print(f"last tree{prompt}, accepted path ✓", style="bold")
    tree = tree_lib.DraftTree.from_parents(parents)
    console.print(tree.render(labels=labels, highlight=path))
    follows = text.label(tokenizer, generation.token_ids[row][-1])
    drafts = f"{len(path) - 1} draft{'' if len(path) == 2 else 's'}"
    console.print(f"{drafts} accepted, then the target's own {follows}", markup=False)


def size(count: int) -> str:
    """Return bytes in the largest unit that keeps a digit before the point."""
    for unit, name in UNITS:
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} B"
