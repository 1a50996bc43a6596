"""Accept lengths and memory as a figure; imported only when one is asked for."""

from matplotlib import figure

from scripts.decoding import options as options_lib
from scripts.decoding import request, result


def draw(
    found: result.Result, asked: request.Request, options: options_lib.Options
) -> figure.Figure:
    """Return a figure: how often each accept length came, bytes of each scheme."""
    drawn = figure.Figure(figsize=(8, 3.5), layout="constrained", dpi=150)
    left, right = drawn.subplots(1, 2)
    counts = result.histogram(found.generation, asked)
    left.bar([str(length) for length in counts], counts.values(), color="tab:green")
    mean = found.generation.mean_accept_length
    left.set(
        title=f"tree {options.tree}, mean {mean:.2f}",
        xlabel="tokens a target pass",
        ylabel="passes",
    )
    schemes = result.state_bytes(found.generation, asked, options.commit)
    below = [0.0] * len(schemes)
    for part in found.generation.state_bytes:
        sizes = [parts[part] / 2**20 for parts in schemes.values()]
        right.bar(list(schemes), sizes, bottom=below, label=part.replace("_", " "))
        below = [b + size for b, size in zip(below, sizes, strict=True)]
    right.set(title=f"decode state, {asked.tree.n_max} nodes", ylabel="MiB")
    right.legend(fontsize="small")
    return drawn
