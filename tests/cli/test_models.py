from dessilbi import models


def test_the_list(cli):
    lines = cli("models").out.splitlines()
    assert lines[0].split() == ["name", "input"]
    assert [line.split()[0] for line in lines[1:]] == models.names()
    assert ["lenet5", "1", "x", "28", "x", "28"] in [line.split() for line in lines]


def test_parameters(cli):
    counts = {line.split()[0]: line.split()[-1] for line in cli("models", "--parameters").out.splitlines()}
    # By hand for LeNet-5; the number torchvision publishes for AlexNet and ResNet-18.
    assert counts["lenet5"] == str(6 * 26 + 16 * 151 + 120 * 401 + 84 * 121 + 10 * 85)
    assert counts["alexnet"] == "61100840"
    assert counts["resnet18"] == "11689512"
