"""Reliability of confidences, intervals and verdicts, of the rule that gives up searches, and of nulls.

    confidence   recovered share of examples compared with the attack's confidence, for each route: the method that gave the
                 answer, such as a closed form or a search
    smooth_decoder  the same of searches with the decoder `smooth`, which have the curve of searches in pixels
    intervals    how often the nominal 95 % intervals of scoring contain the true value
    verdicts     how often the verdict is "no leak" although there is one, and "leak" although there is none
    give_up      how many searches that would succeed if they ran to their end are given up early by the default rule
    nulls        whether the result of any attack's null depends on the update, which it must not read

Images of --data are of the report part, which was not used to choose settings; embedded images were used for that.
Without the name of a table, all tables run. aims: ece (expected calibration error) at most 0.05 on the worst route, coverage 0.92
to 0.98, false_no_leak and false_leak at most 0.05, stopped_wrongly (share of successful searches that the rule gives up) at most
0.02, null_reads_gradient 0.
"""

from importlib import import_module
from typing import Any

from support.contract import Options, parse_options, print_results

TABLE_MODULES = {
    "confidence": "support.calibration.confidence",
    "smooth_decoder": "support.calibration.confidence",
    "intervals": "support.calibration.statistics",
    "verdicts": "support.calibration.statistics",
    "give_up": "support.calibration.give_up",
    "nulls": "support.calibration.nulls",
}


def main() -> None:
    options = parse_options(__doc__ or "", tables=tuple(TABLE_MODULES))
    rows, summary = measure_tables(options)
    print_results("calibration", rows, summary, options)


def measure_tables(options: Options) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the rows of the chosen table or of all, each with its table's name, and their summaries merged into one."""
    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {}
    for table, module in TABLE_MODULES.items():
        if options.table in (None, table):
            own, more = getattr(import_module(module), f"measure_{table}")(options)
            rows += [{"table": table, **row} for row in own]
            summary |= more
    return rows, summary


if __name__ == "__main__":
    main()
