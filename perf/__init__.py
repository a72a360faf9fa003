"""What Conduit costs, measured against the plain alternative in the same run.

`python -m perf.bars NAME` measures each row of one issue's table of bars. The `test_*.py` files hold the same workloads
as pytest-benchmark functions, which run once each as tests. Ratios are the currency here: the machines are shared, so a
figure of one run is never compared with a figure of another.

    workloads    what is measured: named frozen dataclasses and their data
    measure      how: methods interleaved round-robin, medians of paired ratios, spread
    rooflines    memcpy of the same bytes, measured in the same run
    baselines    the plain alternatives: private numpy rings, cpprb, numpy and torch gathers
    subjects     Conduit doing the same work
    processes    the other processes: flat-out writers, attach probes
    bars         one module per issue's table
    suite        every case on every library, interleaved; `python -m perf.benchmarks` writes docs/benchmarks.md from it
    peers        the libraries' adapters and environments
    machine      what a figure was measured on
    verdicts     ratios against the best peer, and their bars
    report, plots  the page and its pictures
    gate         a smoke alarm for slow-downs of hot paths, run with the tests
    compare      this tree against another commit
    layout_study packed records or one array per field, independent of the store
"""
