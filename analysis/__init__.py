"""Reads finished searches from the tracking store, in a script or a notebook as well as behind the commands.

    from analysis import load, effects, compare

    trials = load.trials("quickstart")                    # a DataFrame, one row a trial
    search = load.search("quickstart")                    # the same with curves, finals and the parent run
    effects.effects_frame(effects.main_effects(search))   # what each choice was worth, with intervals
    compare.paired_verdict([-0.02, -0.03, -0.02])         # a verdict on paired differences that survives peeking

docs/analysis.ipynb shows these and more at work.
"""
