"""Lifecycles as rows: of a table to read, of a JSON file, and as a figure."""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from rich import markup
from rich import table as rich_table

from pallas_kernels.commit import spec as commit_specs
from pallas_kernels.history_verify import spec as history_specs
from pallas_kernels.store_all import spec as store_specs
from pallas_kernels.tree_verify import spec as verify_specs
from scripts.benching import lifecycle_runs, lifecycles, tables, timing


def ideal_bytes(cell: lifecycles.Cell) -> float:
    """Return the bytes that a layer has to move in a step, on average, of all rows.

    Of the ops' specs: each state, row and record that is needed, once. For store-all
    they are those of verification, since commit moves an index alone.
    """
    spec = _verify_spec(cell.group)
    state, one = (_commit_spec(spec, path).bytes_moved for path in (0, 1))
    record = one - state
    if cell.label == "store-all":
        return _store_spec(spec).bytes_moved
    if cell.label == "reconstruct":
        return spec.bytes_moved + state + cell.accepted * record
    behind = history_specs.extend(
        spec, horizon=1, record_dtype=cell.lifecycle.record_dtype
    )
    kept = behind.bytes_moved - spec.bytes_moved  # a record of every row
    return (
        spec.bytes_moved
        + kept * cell.records / spec.batch
        + behind.fold_bytes * cell.folds
        + cell.accepted * (record + kept)  # read where they were left, and kept
    )


def _verify_spec(group: lifecycles.Group) -> verify_specs.Spec:
    sizes = group.sizes
    return verify_specs.make_spec(
        batch=group.batch,
        nodes=group.nodes,
        depth=len(group.widths),
        key_heads=sizes.key_heads,
        value_heads=sizes.value_heads,
        key_dim=sizes.dim,
        value_dim=sizes.dim,
        input_dtype="bfloat16",
        state_dtype=group.state_dtype,
    )


def _shared(spec: Any, other: type) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(other)}
    return {k: v for k, v in dataclasses.asdict(spec).items() if k in names}


def _commit_spec(spec: verify_specs.Spec, path: int) -> commit_specs.Spec:
    shared = _shared(spec, commit_specs.Spec)
    return commit_specs.Spec(**shared, path=path, key_dtype=spec.input_dtype)


def _store_spec(spec: verify_specs.Spec) -> store_specs.Spec:
    return store_specs.Spec(**_shared(spec, store_specs.Spec))


def median_us(cell: lifecycles.Cell) -> float | None:
    """Return the device's median, else the host's; None where nothing was timed."""
    samples = cell.device_us or cell.wall_us
    return statistics.median(samples) if samples else None


def state(cell: lifecycles.Cell) -> str:
    """Return "ok", what went wrong, or "not reached"."""
    return cell.problem or ("ok" if cell.errors else "not reached")


def moves_equivalent(
    cell: lifecycles.Cell, us: float | None, bytes_per_s: float
) -> float | None:
    """Return passes over S that a copy makes in that time."""
    return us and 1e-6 * us * bytes_per_s / cell.group.state_bytes


def record(cell: lifecycles.Cell, bytes_per_s: float) -> dict[str, Any]:
    """Return all that is known of a cell; times in microseconds a layer and step."""
    group, us, ideal = cell.group, median_us(cell), ideal_bytes(cell)
    fields = dataclasses.asdict(group)
    sizes = fields.pop("sizes")
    found: dict[str, Any] = {
        "lifecycle": cell.label,
        "options": dataclasses.asdict(cell.lifecycle),
        "state": state(cell),
        "errors": [tables.finite(error) for error in cell.errors],
        "bounds": list(lifecycle_runs.BOUNDS[group.state_dtype]),
        **fields,
        "widths": list(group.widths),
        **{
            f"model_{name}" if name == "layers" else name: x
            for name, x in sizes.items()
        },
        "layers": cell.layers,
        "accepted_a_step": cell.accepted,
        "folds_a_step": cell.folds,
        "records_a_row": cell.records / group.batch,
        "state_bytes": group.state_bytes,
        "ideal_bytes": ideal,
        "ideal_moves": ideal / group.state_bytes,
    }
    for name in ("device_us", "wall_us"):
        samples = getattr(cell, name)
        found[name] = timing.times(samples)._asdict() if samples else None
    moves = moves_equivalent(cell, us, bytes_per_s)
    found |= {
        "moves_equivalent": moves,
        "times_ideal": moves and moves * group.state_bytes / ideal,
        "bytes_per_s": us and 1e6 * ideal / us,
        "part_of_copy": us and 1e6 * ideal / us / bytes_per_s,
        "model_us": us and us * sizes["layers"],
        "launches_a_step": cell.launches,
        "launches_a_layer": cell.launches and cell.launches / cell.layers,
        "kernels_us": cell.kernels,
        "xla_moves": [move._asdict() for move in cell.moves],
        "xla_moved_bytes_a_step": _moved(cell),
    }
    return found


def _moved(cell: lifecycles.Cell) -> float:
    """Return bytes a step of XLA's moves; one outside the loop counts by its part."""
    total = sum(move.nbytes * move.times for move in cell.moves)
    return total / cell.group.sizes.steps


def table(cells: Sequence[lifecycles.Cell], bytes_per_s: float) -> rich_table.Table:
    """Return times and moves of all cells, group by group."""
    drawn = rich_table.Table()
    for name in ("n", "B", "S", "lifecycle"):
        drawn.add_column(name, no_wrap=True)
    names = ("layers", "error", "us", "median", "wall", "ideal", "moves", "x ideal")
    for name in (*names, "TB/s", "launches", "XLA MB"):
        drawn.add_column(name, justify="right", no_wrap=True)
    drawn.add_column("state")
    for group in dict.fromkeys(cell.group for cell in cells):
        for cell in cells:
            if cell.group == group:
                drawn.add_row(*_cells(cell, bytes_per_s))
        drawn.add_section()
    return drawn


def _cells(cell: lifecycles.Cell, bytes_per_s: float) -> list[str]:
    us, ideal = median_us(cell), ideal_bytes(cell)
    device = cell.device_us and timing.times(cell.device_us)
    moves = moves_equivalent(cell, us, bytes_per_s)
    least = ideal / cell.group.state_bytes
    return [
        str(cell.group.nodes),
        str(cell.group.batch),
        cell.group.state_dtype,
        markup.escape(cell.label),
        str(cell.layers),
        f"{max(cell.errors):.1e}" if cell.errors else "-",
        tables.number(device and device.least),
        tables.number(device and device.median),
        tables.number(cell.wall_us and statistics.median(cell.wall_us)),
        f"{least:.2f}",
        f"{moves:.2f}" if moves else "-",
        f"{moves / least:.2f}" if moves else "-",
        f"{1e-6 * ideal / us:.2f}" if us else "-",
        f"{cell.launches:,.0f}" if cell.launches else "-",
        f"{_moved(cell) / 1e6:,.0f}",
        markup.escape(state(cell)),
    ]


def draw(cells: Sequence[lifecycles.Cell], bytes_per_s: float) -> Any:
    """Return moves against batch, a panel a tree and dtype; dashed: the ideal."""
    from matplotlib import figure

    panels: dict[tuple, dict[str, list[lifecycles.Cell]]] = {}
    timed = [cell for cell in cells if median_us(cell)]
    for cell in sorted(timed, key=lambda cell: cell.group.batch):
        lines = panels.setdefault((cell.group.nodes, cell.group.state_dtype), {})
        lines.setdefault(cell.label, []).append(cell)
    columns = max(1, len(panels))
    drawn = figure.Figure(figsize=(4.5 * columns, 4), layout="constrained", dpi=150)
    grid = drawn.subplots(1, columns, squeeze=False)[0]
    colors = {label: f"C{i}" for i, label in enumerate(_labels(timed))}
    for axes, ((nodes, dtype), lines) in zip(grid, panels.items(), strict=False):
        for label, mine in lines.items():
            batch = [c.group.batch for c in mine]
            found = [moves_equivalent(c, median_us(c), bytes_per_s) for c in mine]
            ideal = [ideal_bytes(c) / c.group.state_bytes for c in mine]
            axes.plot(batch, found, "o-", color=colors[label], label=label)
            axes.plot(batch, ideal, "--", color=colors[label], linewidth=1)
        axes.set(xlabel="batch", yscale="log", title=f"n = {nodes}, {dtype}")
        axes.set_xscale("log", base=2)
        axes.legend(fontsize="small")
    grid[0].set_ylabel("state moves equivalent (median)")
    return drawn


def _labels(cells: Sequence[lifecycles.Cell]) -> list[str]:
    return list(dict.fromkeys(cell.label for cell in cells))
