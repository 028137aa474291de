"""The figures of one part, for a terminal."""

from __future__ import annotations

from typing import Any

from .figures import Figure, Spread


def heading(run: dict[str, Any]) -> str:
    """Return on what the run was made, in one line."""
    hardware, software = run["hardware"], run["software"]
    return (
        f"{hardware['cpu']}, {hardware['cores']} cores, {hardware['memory_gb']} GB, "
        f"{hardware['system']}; Python {software['python']}, Django {software['django']}; "
        f"revision {software['revision']}, {software['date']}"
    )


def as_text(result: dict[str, Any]) -> str:
    """Return one part's figures for a terminal."""
    title = f"{result['part']} on {result['database']}, {result['seconds']:g} s"
    if "error" in result:
        return f"{title}\n  FAILED: {result['error']}"
    lines = [title, f"  {', '.join(f'{name}={value}' for name, value in result['server'].items())}"]
    for figure in (Figure(**each) for each in result["figures"]):
        if figure.failure:
            lines.append(f"  {figure.name}: NOT MEASURED: {figure.failure}")
            continue
        lines.append(f"  {figure.name}: {Spread.of(figure.values)} {figure.unit}")
        if figure.references:
            lines.append(f"      {figure.reference}: {Spread.of(figure.references)} {figure.unit}")
            lines.append(f"      ratio: {Spread.of(figure.ratios)}{verdict(figure)}")
        elif figure.bar:
            lines[-1] += verdict(figure)
    return "\n".join(lines)


def verdict(figure: Figure) -> str:
    return f"; target {figure.bar}: {'met' if figure.reached else 'MISSED'}" * bool(figure.bar)
