"""The noise scale, the networks (all called as `net(x, sigma)`), their moving averages and their files.

    from models import load_model
    score_net = load_model("runs/cifar10/score.pt")        # ours, or a file of the authors' release

Images are (B, C, H, W) in [0, 1], points (B, 2); `sigma` is (B,) in the same units.
"""
import contextlib
import copy
import hashlib
import io
import math
import os
import pathlib
import tempfile
import warnings
import zipfile

import torch
import torch.nn.functional as F
from torch import nn


def sigma_at(t, sigma_min=0.01, sigma_max=50.0):
    """σ(t) = σ_min (σ_max/σ_min)^t for t in [0, 1] (Appendix A.6.1)."""
    return sigma_min * (sigma_max / sigma_min) ** t


# ---------------------------------------------------------------------------- networks


class NoiseEmbedding(nn.Module):
    """log σ → Fourier features (frequencies × 2π; sine, then cosine) → Linear → swish → Linear."""

    def __init__(self, frequencies, outputs):
        super().__init__()
        self.register_buffer("W", 16 * torch.randn(frequencies))  # drawn once, never trained
        self.first = nn.Linear(2 * frequencies, outputs)
        self.second = nn.Linear(outputs, outputs)

    def forward(self, sigma):
        angle = 2 * math.pi * sigma.log()[:, None] * self.W
        return self.second(F.silu(self.first(torch.cat([angle.sin(), angle.cos()], 1))))


def group_norm(channels):
    """min(channels / 4, 32) groups; where that does not divide the channels, the next smaller number that does."""
    return nn.GroupNorm(next(g for g in range(min(channels // 4, 32), 0, -1) if channels % g == 0), channels, eps=1e-6)


def fir_filter(x, resample):
    """The separable (1, 3, 3, 1) filter with StyleGAN2's padding; "same" pads for a 3×3 convolution of stride 2."""
    tap = (4 - (2 * torch.arange(4, device=x.device, dtype=x.dtype) - 3).abs()) / 8  # made where x is: a GPU need not wait for it
    kernel = (tap[:, None] * tap).expand(x.shape[1], 1, 4, 4)
    if resample == "up":
        return F.conv_transpose2d(x, 4 * kernel, stride=2, padding=1, groups=x.shape[1])
    stride, padding = (2, 1) if resample == "down" else (1, 2)
    return F.conv2d(x, kernel, stride=stride, padding=padding, groups=x.shape[1])


class Dropout(nn.Dropout):
    """nn.Dropout; on a CPU with 16 random bits a value in place of a Bernoulli draw, which would be a tenth of a training step."""

    def forward(self, x):
        if x.device.type != "cpu" or not self.training or not self.p or torch.compiler.is_compiling():  # which fuses torch's own
            return super().forward(x)
        bits = x.new_empty(x.numel() // 4 + 1, dtype=torch.int64).random_(-(2**63), None).view(torch.int16)
        cut = round(2**16 * self.p)
        return x * (bits[: x.numel()].view(x.shape) >= cut - 2**15).to(x.dtype).mul_(2**16 / (2**16 - cut))


class ResBlock(nn.Module):
    """GroupNorm, swish, [resample], 3×3, + σ projection, GroupNorm, swish, dropout, 3×3; (shortcut + h) / √2."""

    def __init__(self, inputs, outputs, embedding, dropout, resample=None):
        super().__init__()
        self.resample = resample
        self.norm0, self.conv0 = group_norm(inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.project = nn.Linear(embedding, outputs)
        self.norm1, self.conv1 = group_norm(outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.dropout = Dropout(dropout)
        if resample or inputs != outputs:
            self.shortcut = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x, e):
        h = F.silu(self.norm0(x), inplace=True)
        if self.resample:
            h = fir_filter(h, self.resample)
        h = self.conv0(h).add_(self.project(e)[:, :, None, None])
        h = self.conv1(self.dropout(F.silu(self.norm1(h), inplace=True)))
        if self.resample == "up":  # a 1×1 convolution commutes with the filter, and is four times cheaper before it; its bias does not
            x = fir_filter(F.conv2d(x, self.shortcut.weight), "up") + self.shortcut.bias[:, None, None]
        elif hasattr(self, "shortcut"):
            x = self.shortcut(fir_filter(x, "down") if self.resample else x)
        return (x + h).mul_(0.5**0.5)


class Attention(nn.Module):
    """One head of self-attention over all pixels, (x + h) / √2."""

    def __init__(self, channels):
        super().__init__()
        self.norm = group_norm(channels)
        self.query, self.key, self.value, self.out = (nn.Linear(channels, channels) for _ in range(4))

    def forward(self, x):
        h = self.norm(x).flatten(2).transpose(1, 2)
        h = F.scaled_dot_product_attention(*(f(h).unsqueeze(1) for f in (self.query, self.key, self.value))).squeeze(1)
        return (x + self.out(h).transpose(1, 2).reshape(x.shape)).mul_(0.5**0.5)


class Pyramid(nn.Conv2d):
    """The residual input pyramid: the filter, then a 3×3 convolution of stride 2."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs, 3, stride=2)

    def forward(self, x):
        return super().forward(fir_filter(x, "same"))


class NCSNpp(nn.Module):
    """s(x, σ): NCSN++ of Song et al. 2021 (VE, continuous), laid out in the order of the released weights.

    `edm` is ours, for small networks: the output is turned into a score as in EDM (Karras et al. 2022), so that the
    network predicts the image, not the noise, where the noise is large. There the plain form, F / σ, turns a
    relative error of 1% into an error of many times the data.
    """

    def __init__(self, image_size=32, channels=3, width=128, mults=(1, 2, 2, 2), blocks=8, attention=(16,), dropout=0.1, edm=False):
        super().__init__()
        self.config = dict(image_size=image_size, channels=channels, width=width, mults=tuple(mults), blocks=blocks,
                           attention=tuple(attention), dropout=dropout, edm=edm)
        if image_size % 2 ** (len(mults) - 1):
            raise UserError(f"image size {image_size}: {len(mults)} levels need a multiple of {2 ** (len(mults) - 1)} (--size resizes)")
        E = 4 * width

        def block(inputs, outputs, resample=None):
            return ResBlock(inputs, outputs, E, dropout, resample)

        self.embed = NoiseEmbedding(width, E)
        self.stem = nn.Conv2d(channels, width, 3, padding=1)
        self.down = nn.ModuleList()
        c, pyramid, size, skips = width, channels, image_size, [width]
        for level, mult in enumerate(mults):
            for _ in range(blocks):
                self.down.append(block(c, c := mult * width))
                if size in attention:
                    self.down.append(Attention(c))
                skips.append(c)
            if level < len(mults) - 1:
                self.down.extend([block(c, c, "down"), Pyramid(pyramid, c)])
                size, pyramid = size // 2, c
                skips.append(c)
        self.middle = nn.ModuleList([block(c, c), Attention(c), block(c, c)])
        self.up = nn.ModuleList()
        for level, mult in reversed(list(enumerate(mults))):
            for _ in range(blocks + 1):
                self.up.append(block(c + skips.pop(), c := mult * width))
            if size in attention:
                self.up.append(Attention(c))
            if level:
                self.up.append(block(c, c, "up"))
                size *= 2
        self.norm, self.last = group_norm(c), nn.Conv2d(c, channels, 3, padding=1)
        for m in self.modules():
            if isinstance(m, (nn.Conv2d, nn.Linear)):
                nn.init.xavier_uniform_(m.weight)
                nn.init.zeros_(m.bias)
        for m in self.modules():  # as released: attention's logits start small
            if isinstance(m, Attention):
                for part in (m.query, m.key, m.value):
                    part.weight.data.mul_(0.1**0.5)
        for m in self.modules():  # every block starts as its shortcut, the network at zero
            last = {ResBlock: "conv1", Attention: "out", NCSNpp: "last"}.get(type(m))
            if last:
                nn.init.zeros_(getattr(m, last).weight)

    def forward(self, x, sigma):
        s = sigma.view(-1, 1, 1, 1)
        u = 2 * x - 1  # the noise of u is 2σ
        total = (4 * s**2 + 0.25).sqrt()  # deviation of noisy data, taking 0.5 for clean data in [−1, 1]
        e = F.silu(self.embed(sigma))  # every block applies swish before its own projection
        pyramid = u / total if self.config["edm"] else u
        h = self.stem(pyramid)
        skips = [h]
        for m in self.down:
            if isinstance(m, Attention):
                h = skips[-1] = m(h)
            elif isinstance(m, Pyramid):
                h = pyramid = (m(pyramid) + h) * 0.5**0.5
                skips.append(h)
            else:
                h = m(h, e)
                if not m.resample:
                    skips.append(h)
        first, attention, second = self.middle
        h = second(attention(first(h, e)), e)
        for m in self.up:
            if isinstance(m, Attention):
                h = m(h)
            else:
                h = m(h if m.resample else torch.cat([h, skips.pop()], 1), e)
        h = self.last(F.silu(self.norm(h))).float()
        if self.config["edm"]:  # D(u) = u c_skip + h c_out, and the score in x is (D − u) / 2σ²
            return (0.5 * h / total - 2 * s * u / total**2) / s
        return h / s


class BasicBlock(nn.Module):
    def __init__(self, inputs, outputs, stride, norm, act):
        super().__init__()
        self.act = act
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), norm(outputs)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), norm(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs))

    def forward(self, x):
        h = self.act(self.bn1(self.conv1(x)))  # nothing in place: DLSM' differentiates twice
        return self.act(self.bn2(self.conv2(h)) + self.shortcut(x))


class NoisyResNet(nn.Module):
    """Logits of p(y|x̃, σ): ResNet-18 or -34 with a CIFAR stem, a projection of σ added after each of its four stages.

    `scaled` divides the input by the deviation of noisy data (ours; the paper's sees x̃ as it is, from σ = 0.01 to 50), and
    act="silu" is smooth (ours, too): with ReLU the gradient that DLSM' trains is a step function of x̃.
    """

    def __init__(self, depth=18, classes=10, width=64, channels=3, norm="batch", scaled=False, act="relu"):
        super().__init__()
        self.config = dict(depth=depth, classes=classes, width=width, channels=channels, norm=norm, scaled=scaled, act=act)
        self.act = dict(relu=F.relu, silu=F.silu)[act]
        normalise = nn.BatchNorm2d if norm == "batch" else lambda c: nn.GroupNorm(math.gcd(8, c), c)
        self.embed = NoiseEmbedding(32, 128)
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 3, padding=1, bias=False), normalise(width)
        widths = [width * 2**i for i in range(4)]
        self.dense = nn.ModuleList(nn.Linear(128, w) for w in widths)
        self.layers, inputs = nn.ModuleList(), width
        for i, (w, count) in enumerate(zip(widths, {18: (2, 2, 2, 2), 34: (3, 4, 6, 3)}[depth])):
            blocks = [BasicBlock(inputs if j == 0 else w, w, 2 if i and j == 0 else 1, normalise, self.act) for j in range(count)]
            self.layers.append(nn.Sequential(*blocks))
            inputs = w
        self.linear = nn.Linear(inputs, classes)
        for part in (self.embed.first, self.embed.second):  # as released
            nn.init.xavier_uniform_(part.weight)
            nn.init.zeros_(part.bias)

    def features(self, x, sigma):
        """The penultimate layer: the mean over the last map."""
        if self.config["scaled"]:
            x = (x - 0.5) / (sigma**2 + 0.0625).sqrt().view(-1, 1, 1, 1)
        e = F.silu(self.embed(sigma))
        h = self.act(self.bn1(self.conv1(x)))
        for layer, dense in zip(self.layers, self.dense):
            h = layer(h) + dense(e)[:, :, None, None]
        return h.mean((2, 3))

    def forward(self, x, sigma):
        return self.linear(self.features(x, sigma))


def fold_batchnorm(net):
    """A copy of a NoisyResNet in evaluation mode with every BatchNorm folded into its convolution: the same function, faster."""
    net = copy.deepcopy(net)
    for m in list(net.modules()):
        for conv, norm in (("conv1", "bn1"), ("conv2", "bn2"), ("0", "1")):
            if isinstance(getattr(m, norm, None), nn.BatchNorm2d):
                setattr(m, conv, nn.utils.fuse_conv_bn_eval(getattr(m, conv), getattr(m, norm)))
                setattr(m, norm, nn.Identity())
    return net.requires_grad_(False)


class ToyNet(nn.Module):
    """The two-moons networks, score (2 outputs) and classifier: a multilayer perceptron on x and σ.

    join="late" is the paper's: σ has a branch of its own, a quarter as wide, that meets x in the last linear layer, with
    ReLU; so the output is A(x) + B(σ), and its gradient in x cannot depend on σ. join="early" sees both from the
    first layer, with a smooth activation. `scaled` feeds x / 10 and log σ in place of x and σ.
    """

    def __init__(self, outputs, widths=(128, 64, 32), join="late", scaled=True):
        super().__init__()
        self.config = dict(outputs=outputs, widths=tuple(widths), join=join, scaled=scaled)

        def perceptron(sizes, activation):
            return nn.Sequential(*(m for a, b in zip(sizes, sizes[1:]) for m in (nn.Linear(a, b), activation())))

        if join == "late":
            self.x_branch = perceptron((2, *widths), nn.ReLU)
            self.sigma_branch = perceptron((1, *(w // 4 for w in widths)), nn.ReLU)
            self.last = nn.Linear(widths[-1] + widths[-1] // 4, outputs)
        else:
            self.both = perceptron((3, *widths), nn.SiLU)
            self.last = nn.Linear(widths[-1], outputs)

    def forward(self, x, sigma):
        sigma = sigma[:, None]
        if self.config["scaled"]:
            x, sigma = x / 10, sigma.log()
        if self.config["join"] == "late":
            return self.last(torch.cat([self.x_branch(x), self.sigma_branch(sigma)], 1))
        return self.last(self.both(torch.cat([x, sigma], 1)))


NETWORKS = {cls.__name__: cls for cls in (NCSNpp, NoisyResNet, ToyNet)}


class EMA:
    """Moving average of a network's parameters; its decay warms up as (1 + n) / (10 + n) over the n updates so far."""

    def __init__(self, net, decay=0.999):
        self.parameters = list(net.parameters())
        self.shadow = [p.detach().clone() for p in self.parameters]
        self.decay, self.updates = decay, 0

    @torch.no_grad()
    def update(self):
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        torch._foreach_lerp_(self.shadow, [p.detach() for p in self.parameters], 1 - decay)

    @contextlib.contextmanager
    def applied(self):
        """Within this block the network has the averaged weights."""
        kept = [p.detach().clone() for p in self.parameters]
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.shadow)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self.parameters, kept)


# ---------------------------------------------------------------------------- files


class UserError(Exception):
    """Bad input or a run that cannot go on: shown as one line, exit code 2, no traceback."""


def write_whole(path, data):
    """Writes bytes to a temporary file, syncs it and renames it: `path` is always the old file or the new one, whole."""
    path, name = pathlib.Path(path), None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException as error:
        if name:
            pathlib.Path(name).unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename, error.filename2 = str(path), None  # a full disk names no file, the rename the temporary one
        raise


def check_zip(path):
    """A damaged zip file is an error here; torch and numpy read the parts they want without a look at its checksums."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as file:
            if damaged := file.testzip():
                raise zipfile.BadZipFile(damaged)


def checksum(value):
    """sha256 over nested dicts and lists of tensors and plain values, in their order."""
    digest = hashlib.sha256()

    def add(v):
        if isinstance(v, torch.Tensor):
            if v.numel() * v.element_size() > v.untyped_storage().nbytes():
                raise ValueError("a tensor that claims more memory than it has")  # a stranger's file could fill the machine
            digest.update(f"{v.dtype} {tuple(v.shape)}".encode())
            digest.update(v.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        elif isinstance(v, dict):
            digest.update(b"{")
            for pair in v.items():
                add(pair)
        elif isinstance(v, (list, tuple)):
            digest.update(f"[{len(v)}".encode())
            for item in v:
                add(item)
        else:
            digest.update(repr(v).encode())

    add(value)
    return digest.hexdigest()


def save_checkpoint(path, checkpoint):
    """A plain dict of tensors and plain values, with a checksum over all of it."""
    buffer = io.BytesIO()  # in memory first: a full disk is then an ordinary OSError
    torch.save({**checkpoint, "checksum": checksum(checkpoint)}, buffer)
    write_whole(path, buffer.getbuffer())


def load_checkpoint(path, device="cpu"):
    """The dict in a file. Ours carry a checksum; a bare state dict and the authors' files, which have "model", need none."""
    try:
        check_zip(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old formats warn; an error is one line
            checkpoint = torch.load(path, map_location=device, weights_only=True)
        found = checkpoint.pop("checksum", None)
        strange = "model" in checkpoint or all(isinstance(value, torch.Tensor) for value in checkpoint.values())
        whole = bool(strange and found is None or found == checksum(checkpoint))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except Exception as error:  # a damaged or hostile file can fail in any way; none of them runs code
        what = f"not a readable checkpoint, perhaps cut off or damaged ({type(error).__name__})"
        raise UserError(f"{path}: {what}; delete it or get it again") from None
    if not whole:
        raise UserError(f"{path}: its checksum does not match, the file is damaged; delete it or get it again")
    return checkpoint


def header(net, kind, **about):
    """What a checkpoint says of its network: enough to rebuild it and to know where it came from."""
    return dict(kind=kind, network=type(net).__name__, config=net.config, **about)


def load_model(path, device="cpu", kind=None):
    """The network of a checkpoint, ready to use: EMA weights, evaluation mode, frozen; also the authors' released files.

    `net.about` is the checkpoint's header: kind ("score" or "classifier"), settings (with σ_min and σ_max), step.
    """
    checkpoint = load_checkpoint(path)
    if "model" in checkpoint:
        net, about = _released(path, checkpoint)
    else:
        try:
            about = {key: checkpoint[key] for key in ("kind", "network", "config", "settings", "step")}
            weights = dict(checkpoint["weights"])
            limit = max([len(weights)] + [size for value in weights.values() for size in value.shape])
            if any(not 0 < value <= limit for key, value in about["config"].items() if type(value) is int and key != "image_size"):
                raise ValueError("a network larger than its weights")  # a stranger's file could fill the machine
            net = NETWORKS[about["network"]](**about["config"])
            if checkpoint["ema"] is not None:
                weights.update(zip((name for name, _ in net.named_parameters()), checkpoint["ema"]["shadow"], strict=True))
            if any(weights[key].dtype != value.dtype for key, value in net.state_dict().items()):
                raise TypeError("weights of another type")
            net.load_state_dict(weights)
        except Exception as error:  # another version's, or a stranger's: it can fail in any way
            words = " ".join(str(error).split())[:90]
            raise UserError(f"{path}: not a checkpoint of this project ({type(error).__name__}: {words})") from None
    if kind and about["kind"] != kind:
        raise UserError(f"{path}: is a {about['kind']} checkpoint, a {kind} checkpoint is needed here")
    net.about = about
    layout = torch.channels_last if str(device) == "cpu" else torch.preserve_format  # up to 1.2 times as fast there, gradients in x too
    return net.to(device, memory_format=layout).eval().requires_grad_(False)


def export(path, out):
    """Copies a checkpoint without what only training needs, the EMA as its weights: a quarter of the size, to hand on."""
    net = load_model(path)
    save_checkpoint(out, dict(**net.about, weights=net.state_dict(), ema=None))


def _released(path, checkpoint):
    """A network of ours with the weights of a released file, told by its keys and filled in order, strictly."""
    try:
        theirs = {key.removeprefix("module."): value for key, value in checkpoint["model"].items()}
        shapes = {key: tuple(value.shape) for key, value in theirs.items()}
        if "all_modules.0.W" in theirs:
            theirs.pop("sigmas", None)
            parts = {}  # number of the module → the names inside it
            for key in theirs:
                parts.setdefault(int(key.split(".")[1]), set()).add(".".join(key.split(".")[2:]))
            pyramids = [n for n, names in parts.items() if "Conv2d_0.weight" in names]
            firsts = [4] + [n + 1 for n in pyramids]  # each level begins after a pyramid
            width, channels = shapes["all_modules.3.weight"][:2]
            net = NCSNpp(
                channels=channels, width=width, mults=[shapes[f"all_modules.{n}.Conv_0.weight"][0] // width for n in firsts],
                blocks=sum("Conv_0.weight" in parts[n] for n in range(4, pyramids[0])) - 1,
                attention=[32 >> i for i, n in enumerate(firsts) if "NIN_0.W" in parts[n + 1] and i < len(pyramids)])
            kind = "score"
        else:
            theirs = {key.removeprefix("classifier."): value for key, value in theirs.items()}
            depth = {2: 18, 6: 34}[len({key.split(".")[2] for key in theirs if key.startswith("classifier.layer3.")})]
            classes = theirs["classifier.linear.weight"].shape[0]
            width, channels = theirs["classifier.conv1.weight"].shape[:2]
            net, kind = NoisyResNet(depth, classes, width, channels), "classifier"
        if kind == "score":  # sampling must use the averaged weights: a list in the order of the trainable parameters
            trained = [key for key in theirs if not key.endswith("modules.0.W")]
            theirs.update(zip(trained, checkpoint["ema"]["shadow_params"], strict=True))
        def role(key):  # weight, bias, running_mean, ...; NIN's W and b are a matrix (in, out) and a bias
            return {"W": "weight", "b": "bias"}.get(key.split(".")[-1], key.split(".")[-1])

        for (name, mine), (key, value) in zip(net.state_dict().items(), theirs.items(), strict=True):
            value = value.T if ".NIN_" in key and value.ndim == 2 else value
            if mine.shape != value.shape or role(name) != role(key):
                raise ValueError(f"{key} {tuple(value.shape)} does not fit {name} {tuple(mine.shape)}")
            mine.copy_(value)
    except Exception as error:
        raise UserError(f"{path}: neither our checkpoint nor one of the authors' ({' '.join(str(error).split())[:200]})") from None
    settings = dict(data=f"cifar{net.config.get('classes', 10)}", size=32, sigma_min=0.01, sigma_max=50.0)
    return net, dict(kind=kind, network=type(net).__name__, config=net.config, settings=settings, step=checkpoint.get("step"))
