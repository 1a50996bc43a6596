"""Print the tables of the pages from the result files.

    python scripts/make_tables.py

What they are made from is in scripts/result_tables. tests/test_readme.py fails when a
page does not hold exactly these.
"""

from scripts.result_tables import acceptance, kernels, steps

README, RESULTS = "README.md", "scripts/results/README.md"
TABLES = {
    acceptance.acceptance: README,
    acceptance.shapes: RESULTS,
    acceptance.planned: RESULTS,
    acceptance.drafts: RESULTS,
    acceptance.plans: RESULTS,
    acceptance.lossless: RESULTS,
    steps.memory_a_sequence: README,
    acceptance.validation: "models/pretrained/tiny/README.md",
    kernels.verification_in_short: README,
    kernels.verification: RESULTS,
    kernels.other_kernels: RESULTS,
    kernels.commits: RESULTS,
    kernels.texts: RESULTS,
    kernels.peers: RESULTS,
    steps.compiled_peaks: RESULTS,
    steps.compiled_by_batch: RESULTS,
    steps.compiled_largest: RESULTS,
    steps.steps: RESULTS,
    steps.whole_steps: RESULTS,
    steps.against_the_chain: RESULTS,
    steps.largest_batches: RESULTS,
    steps.two_devices: RESULTS,
    steps.shares: RESULTS,
}

if __name__ == "__main__":
    for table, page in TABLES.items():
        print(f"{page}: {table.__doc__}\n\n{table()}\n")
