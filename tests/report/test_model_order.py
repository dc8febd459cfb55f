"""Models have the same order in every table and gallery of the reports."""

from ropelens.report.model_order import in_model_order


def test_small_models_come_first_and_random_weights_last():
    names = [
        "random",
        "smollm2-135m",
        "gemma3-270m",
        "llama",
        "bundled-rope-step-1000",
        "bundled-rope-step-500",
        "bundled-nope",
        "bundled-rope",
        "stories260k",
        "babyllama105",
    ]
    assert in_model_order(names) == [
        "bundled-rope",
        "bundled-rope-step-500",
        "bundled-rope-step-1000",
        "bundled-nope",
        "babyllama105",
        "stories260k",
        "smollm2-135m",
        "gemma3-270m",
        "llama",
        "random",
    ]
