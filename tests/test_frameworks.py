"""`record` around other people's training loops: phases, steps and bytes as in a step of ours, nothing disturbed."""

import copy
import importlib.util
import logging
import os

import pytest
import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks
from truth import distinct_bytes

import memlab

SIZE = 8
INPUTS, TARGETS = SIZE * 16 * 4, SIZE * 4 * 4  # bytes
SCALARS = 64  # bytes: what the loops keep of the loss, to report it


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(16, 64), nn.Linear(64, 4)

    def forward(self, x, labels):
        return {"loss": (self.decoder(torch.tanh(self.encoder(x))) - labels).square().mean()}


def samples(steps):
    return [{"x": torch.randn(16), "labels": torch.randn(4)} for _ in range(steps * SIZE)]


def hugging_face(model, data):
    import transformers

    arguments = transformers.TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=SIZE,
        num_train_epochs=1,
        optim="adamw_torch",  # not the fused one, which needs less memory than that of our own step
        max_grad_norm=0.0,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data)
    return trainer.train


def lightning(model, data):
    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = model

        def training_step(self, batch, index):
            return self.net(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = torch.utils.data.DataLoader(data, batch_size=SIZE)
    return lambda: trainer.fit(Module(), loader)


@pytest.fixture(params=[hugging_face, lightning], ids=lambda prepare: prepare.__name__)
def prepare(request, tmp_path, monkeypatch):
    """The loop's maker: of a model and samples it makes a function that trains."""
    monkeypatch.chdir(tmp_path)
    for name in {"hugging_face": ("transformers", "accelerate"), "lightning": ("lightning",)}[request.param.__name__]:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs {name}, which is not installed")
    return request.param


pytestmark = pytest.mark.filterwarnings("ignore")  # theirs


def test_steps_phases_and_bytes_are_those_of_the_same_step(prepare):
    model, data = Net(), samples(3)
    train = prepare(model, data)
    with memlab.record() as trace:
        train()
    batch = {name: torch.stack([sample[name] for sample in data[:SIZE]]) for name in data[0]}
    step = memlab.TrainingStep(Net, batch, lambda model, batch: model(**batch)["loss"], torch.optim.AdamW)
    ours = memlab.measure(step, allocator=False)
    assert len(trace.steps) == 3
    parameters = distinct_bytes(model.parameters())
    for theirs in trace.steps:
        assert list(theirs.by_phase()) == ["forward", "backward", "optimizer"]
        assert theirs.by_category()["parameters"] == theirs.by_category()["gradients"] == parameters
        assert theirs.saved_bytes == ours.saved_bytes + INPUTS  # made within the block: not known as the batch
    last = trace.steps[-1]
    assert last.by_category()["optimizer state"] == ours.by_category()["optimizer state"]
    assert last.peak.phase == ours.peak.phase == "optimizer"
    assert ours.peak_bytes <= last.peak_bytes <= ours.peak_bytes + SCALARS
    assert trace.steps[1].peak_bytes - last.peak_bytes in (
        0,
        INPUTS + TARGETS,
    )  # Accelerate loads the next batch before a step
    assert {tensor.module.rpartition(".")[2] for tensor in trace.saved} >= {"encoder", "decoder"}
    assert trace.growth == ()


def test_a_loop_that_keeps_its_losses_is_found_out(prepare):
    kept = []

    class Keeps(Net):
        def forward(self, x, labels):
            output = super().forward(x, labels)
            kept.append(output["loss"])
            return output

    train = prepare(Keeps(), samples(5))
    with memlab.record() as trace:
        train()
    (growth,) = trace.growth
    assert (growth.bytes_per_step, growth.through_graph) == (4, True)
    assert "list `kept`" in growth.holder


def test_training_goes_as_without_and_leaves_nothing_behind(prepare, tmp_path):
    model, data = Net(), samples(3)
    other = copy.deepcopy(model)
    torch.manual_seed(0)
    prepare(model, data)()
    before = set(os.listdir(tmp_path))
    hooks = [
        module_hooks._global_forward_pre_hooks,
        module_hooks._global_forward_hooks,
        optimizer_hooks._global_optimizer_pre_hooks,
        optimizer_hooks._global_optimizer_post_hooks,
    ]
    counts, engine = [len(hook) for hook in hooks], torch.autograd._engine_run_backward
    torch.manual_seed(0)
    train = prepare(other, data)
    with memlab.record():
        train()
    for with_record, without in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(with_record, without)
    assert [len(hook) for hook in hooks] == counts
    assert torch.autograd._engine_run_backward is engine
    assert set(os.listdir(tmp_path)) == before
