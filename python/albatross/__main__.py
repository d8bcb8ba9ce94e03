"""`python -m albatross`: the same report as `albatross doctor`, for bug reports. Works without a GPU."""

from albatross.cli.doctor import collect_report, render_report

if __name__ == "__main__":
    render_report(collect_report())
