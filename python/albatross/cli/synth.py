"""`albatross synth`: writes a random checkpoint, with a progress bar."""

from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from albatross.cli.terminal import notes


def synth(size: str, out: Path, seed: int) -> None:
    """Raises ConfigError for an unknown size or a file that cannot be written."""
    from albatross.models.synth import write_checkpoint

    with Progress(TextColumn("drawing weights"), BarColumn(), DownloadColumn(), TimeRemainingColumn(), console=notes) as bar:
        task = bar.add_task("", total=None)
        write_checkpoint(size, out, seed, lambda done, total: bar.update(task, completed=done, total=total))
    notes.print(f"{out} holds a random model of size {size}: {out.stat().st_size / 1e9:.2f} GB.", markup=False)
