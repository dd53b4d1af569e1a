"""The noise scale, the networks (all called as `net(x, sigma)`), their moving average, and their files.

    from models import load_model
    score_net = load_model("runs/cifar10/score.pt")        # ours, or a file of the authors' release

Images are (B, C, H, W) in [0, 1], points (B, 2); `sigma` is (B,), in the same units.
"""
import contextlib
import copy
import hashlib
import io
import math
import os
import pathlib
import warnings
import zipfile

import torch
import torch.nn.functional as F
from torch import nn

# ------------------------------------------------------------ 1. the story: noise, networks, exact scores


def sigma_at(t, sigma_min=0.01, sigma_max=50.0):
    """σ(t) = σ_min (σ_max/σ_min)^t for t in [0, 1] (Appendix A.6.1)."""
    return sigma_min * (sigma_max / sigma_min) ** t


def append_dims(value, x):
    """(B,) → (B, 1, ...), to multiply x with; a number stays as it is."""
    return value.view(-1, *[1] * (x.ndim - 1)) if torch.is_tensor(value) and value.ndim else value


class NCSNpp(nn.Module):
    """s(x, σ): NCSN++ of Song et al. 2021 (VE, continuous), laid out in the order of the released weights.

    `edm` is ours, for small networks: the output becomes a score as in EDM (Karras et al. 2022), so that the
    network predicts the image, not the noise, where the noise is large. There the plain form, F / σ, turns a
    relative error of 1% into an error of many times the data. With `classes` it is s(x, σ, y), the paper's
    method (c): a label embedding is added to that of σ; without y, or with y = classes, it is s(x, σ).
    """

    def __init__(self, image_size=32, channels=3, width=128, mults=(1, 2, 2, 2), blocks=8, attention=(16,),
                 dropout=0.1, edm=False, classes=0):
        super().__init__()
        self.config = dict(image_size=image_size, channels=channels, width=width, mults=tuple(mults),
                           blocks=blocks, attention=tuple(attention), dropout=dropout, edm=edm)
        least = 2 ** (len(mults) - 1)
        if image_size % least:
            raise UserError(f"image size {image_size}: needs to be a multiple of {least}; see --size")
        if classes:
            self.config["classes"] = classes
            self.label = nn.Embedding(classes + 1, 4 * width)
            nn.init.zeros_(self.label.weight)

        def block(inputs, outputs, resample=None):
            return ResBlock(inputs, outputs, 4 * width, dropout, resample)

        self.embed = NoiseEmbedding(width, 4 * width)
        self.stem = nn.Conv2d(channels, width, 3, padding=1)
        self.down = nn.ModuleList()
        c, pyramid, size, skips = width, channels, image_size, [width]
        for level, mult in enumerate(mults):
            for _ in range(blocks):
                self.down.append(block(c, mult * width))
                c = mult * width
                if size in attention:
                    self.down.append(Attention(c))
                skips.append(c)
            if level < len(mults) - 1:
                self.down.extend([block(c, c, "down"), nn.Conv2d(pyramid, c, 3, stride=2)])
                size, pyramid = size // 2, c
                skips.append(c)
        self.middle = nn.ModuleList([block(c, c), Attention(c), block(c, c)])
        self.up = nn.ModuleList()
        for level, mult in reversed(list(enumerate(mults))):
            for _ in range(blocks + 1):
                self.up.append(block(c + skips.pop(), mult * width))
                c = mult * width
            if size in attention:
                self.up.append(Attention(c))
            if level:
                self.up.append(block(c, c, "up"))
                size *= 2
        self.norm, self.last = group_norm(c), nn.Conv2d(c, channels, 3, padding=1)
        for m in self.modules():  # initial values as released
            if isinstance(m, (nn.Conv2d, nn.Linear)):
                nn.init.xavier_uniform_(m.weight)
                nn.init.zeros_(m.bias)
        for name, p in self.named_parameters():
            if name.endswith(("query.weight", "key.weight", "value.weight")):
                p.data.mul_(0.1**0.5)  # small logits: variance scale 0.1
            elif name.endswith(("conv1.weight", "out.weight", "last.weight")):
                p.data.zero_()  # every block starts as its shortcut, the network at zero

    def forward(self, x, sigma, y=None):
        s = sigma.view(-1, 1, 1, 1)
        u = 2 * x - 1  # the noise of u is 2σ
        total = (4 * s**2 + 0.25).sqrt()  # deviation of noisy data, taking 0.5 for clean data in [−1, 1]
        e = self.embed(sigma)
        if "classes" in self.config:
            if y is None:
                y = sigma.new_full(sigma.shape, self.config["classes"], dtype=torch.int64)
            e = e + self.label(y)
        elif y is not None:
            raise UserError("this score model knows no classes; see train_score.py --conditional")
        e = F.silu(e)  # every block applies swish before its own projection
        pyramid = u / total if self.config["edm"] else u
        h = self.stem(pyramid)
        skips = [h]
        for m in self.down:
            if isinstance(m, Attention):
                h = skips[-1] = m(h)
            elif isinstance(m, nn.Conv2d):  # the residual input pyramid
                h = pyramid = (m(fir_filter(pyramid, "same")) + h) * 0.5**0.5
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
            elif m.resample:
                h = m(h, e)
            else:
                h = m(torch.cat([h, skips.pop()], 1), e)
        h = self.last(F.silu(self.norm(h))).float()
        if self.config["edm"]:  # D(u) = u c_skip + h c_out, and the score in x is (D − u) / 2σ²
            return (0.5 * h / total - 2 * s * u / total**2) / s
        return h / s


class NoisyResNet(nn.Module):
    """Logits of p(y|x̃, σ): ResNet-18 or -34 with a CIFAR stem, σ projected and added after each stage.

    `scaled` divides the input by the deviation of noisy data (ours; the paper's sees it raw), act="silu" is
    smooth (ours, too): with ReLU the gradient that DLSM' trains is a step function of x̃.
    """

    def __init__(self, depth=18, classes=10, width=64, channels=3, norm="batch", scaled=False, act="relu"):
        super().__init__()
        self.config = dict(depth=depth, classes=classes, width=width, channels=channels, norm=norm,
                           scaled=scaled, act=act)
        self.act = dict(relu=F.relu, silu=F.silu)[act]
        normalise = nn.BatchNorm2d if norm == "batch" else lambda c: nn.GroupNorm(math.gcd(8, c), c)
        self.embed = NoiseEmbedding(32, 128)
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 3, padding=1, bias=False), normalise(width)
        widths = [width * 2**i for i in range(4)]
        self.dense = nn.ModuleList(nn.Linear(128, w) for w in widths)
        self.layers = nn.ModuleList()
        inputs = width
        for w, count in zip(widths, {18: (2, 2, 2, 2), 34: (3, 4, 6, 3)}[depth]):
            first = BasicBlock(inputs, w, normalise, self.act)
            rest = [BasicBlock(w, w, normalise, self.act) for _ in range(count - 1)]
            self.layers.append(nn.Sequential(first, *rest))
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


class ToyNet(nn.Module):
    """The two-moons networks, score (2 outputs) and classifier: a multilayer perceptron on x and σ.

    join="late" is the paper's: σ has a branch of its own, a quarter as wide, that meets x in the last linear
    layer, with ReLU; so the output is A(x) + B(σ), and its gradient in x does not depend on σ. join="early"
    sees both from the first layer, with a smooth activation. `scaled` feeds x / 10 and log σ.
    """

    def __init__(self, outputs, widths=(128, 64, 32), join="late", scaled=True):
        super().__init__()
        self.config = dict(outputs=outputs, widths=tuple(widths), join=join, scaled=scaled)

        def perceptron(sizes, activation):
            layers = [(nn.Linear(inputs, outputs), activation()) for inputs, outputs in zip(sizes, sizes[1:])]
            return nn.Sequential(*(part for layer in layers for part in layer))

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


class ExactScore(nn.Module):
    """∇ log p_σ(x) of a finite data set (Eq. 2): Σᵢ wᵢ (xᵢ − x) / σ² with w = softmax(−‖x − xᵢ‖² / 2σ²).

    net(x, σ) takes all of the data: the prior score. net(x, σ, y) takes the data of each row's class: the
    posterior score. Their difference is the true likelihood score. uint8 images stand for x in [0, 1].
    """

    def __init__(self, images, labels):
        super().__init__()
        torch.set_float32_matmul_precision("highest")  # a small σ needs the digits that TF32 leaves out
        order = labels.argsort(stable=True)  # each class is then a slice
        self.register_buffer("images", images[order])
        self.register_buffer("labels", labels[order])
        self.bounds = [0, *labels.bincount().cumsum(0).tolist()]
        self.config = dict(zip(("channels", "image_size"), images.shape[1:3]))
        points = self.images.flatten(1)
        if points.dtype == torch.uint8:
            points = points.float() / 255
        self.register_buffer("center", points.mean(0), persistent=False)
        points = points - self.center
        half_norms = points.square().sum(1, keepdim=True) / 2
        self.register_buffer("points", torch.cat([points, half_norms], 1), persistent=False)

    def forward(self, x, sigma, y=None):
        if y is None:
            return self.score(x, sigma, self.points)
        score = torch.empty_like(x)
        for c in y.unique().tolist():
            if not 0 <= c < len(self.bounds) - 1 or self.bounds[c] == self.bounds[c + 1]:
                raise UserError(f"the exact score has no images of class {c}")
            rows = y == c
            score[rows] = self.score(x[rows], sigma[rows], self.points[self.bounds[c] : self.bounds[c + 1]])
        return score

    def score(self, x, sigma, points):
        flat = x.flatten(1) - self.center  # around the mean of the data, where a product loses fewer digits
        variance = sigma[:, None] ** 2
        if flat.shape[1] < 8:  # from differences: with few coordinates the points may lie very close
            points, means = points[:, :-1], []
            for rows, v in zip(flat.split(1024), variance.split(1024)):
                distance = torch.cdist(rows, points, compute_mode="donot_use_mm_for_euclid_dist")
                means.append(torch.softmax(distance.square_().mul_(-0.5).div_(v), 1) @ points)
            mean = torch.cat(means)
        else:  # attention: −‖x − xᵢ‖² / 2 = x·xᵢ − ‖xᵢ‖² / 2, but for ‖x‖², which softmax does not see
            queries = torch.cat([flat, -torch.ones_like(variance)], 1) / variance
            batch = (part[None, None] for part in (queries, points, points))
            mean = F.scaled_dot_product_attention(*batch, scale=1.0)[0, 0, :, :-1]
        return ((mean - flat) / variance).view_as(x)


class EMA:
    """Moving average of a network's parameters; its decay warms up as (1 + n) / (10 + n) over n updates."""

    def __init__(self, net, decay=0.999):
        self.parameters = list(net.parameters())
        self.shadow = [p.detach().clone() for p in self.parameters]
        self.decay, self.updates = decay, 0

    @torch.no_grad()
    def update(self):
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        torch._foreach_lerp_(self.shadow, self.parameters, 1 - decay)

    @contextlib.contextmanager
    @torch.no_grad()
    def applied(self):
        """Within this block the network has the averaged weights."""
        kept = [p.clone() for p in self.parameters]
        torch._foreach_copy_(self.parameters, self.shadow)
        try:
            yield
        finally:
            torch._foreach_copy_(self.parameters, kept)


# ------------------------------------------------------------ 2. what the networks are made of


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
    """min(channels / 4, 32) groups, or the next smaller number that divides the channels."""
    groups = next(g for g in range(min(channels // 4, 32), 0, -1) if channels % g == 0)
    return nn.GroupNorm(groups, channels, eps=1e-6)


def fir_filter(x, resample):
    """The separable (1, 3, 3, 1) filter with StyleGAN2's padding; "same" pads for a stride of 2."""
    # Made where x is, so that a GPU need not wait for a copy.
    tap = (4 - (2 * torch.arange(4, device=x.device, dtype=x.dtype) - 3).abs()) / 8
    kernel = (tap[:, None] * tap).expand(x.shape[1], 1, 4, 4)
    if resample == "up":
        return F.conv_transpose2d(x, 4 * kernel, stride=2, padding=1, groups=x.shape[1])
    stride, padding = (2, 1) if resample == "down" else (1, 2)
    return F.conv2d(x, kernel, stride=stride, padding=padding, groups=x.shape[1])


class ResBlock(nn.Module):
    """GroupNorm, swish, [resample], 3×3, + σ, GroupNorm, swish, dropout, 3×3; (shortcut + h) / √2."""

    def __init__(self, inputs, outputs, embedding, dropout, resample=None):
        super().__init__()
        self.resample = resample
        self.norm0, self.conv0 = group_norm(inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.project = nn.Linear(embedding, outputs)
        self.norm1, self.conv1 = group_norm(outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.dropout = nn.Dropout(dropout)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if resample or inputs != outputs else nn.Identity()

    def forward(self, x, e):
        h = F.silu(self.norm0(x))
        if self.resample:
            h = fir_filter(h, self.resample)
        h = self.conv0(h).add_(self.project(e)[:, :, None, None])
        h = self.conv1(self.dropout(F.silu(self.norm1(h))))
        if self.resample == "up":
            # A 1×1 convolution commutes with the filter, and is cheaper before it; its bias does not.
            x = fir_filter(F.conv2d(x, self.shortcut.weight), "up") + self.shortcut.bias[:, None, None]
        elif self.resample == "down":
            x = self.shortcut(fir_filter(x, "down"))
        else:
            x = self.shortcut(x)
        return (x + h).mul_(0.5**0.5)


class Attention(nn.Module):
    """One head of self-attention over all pixels, (x + h) / √2."""

    def __init__(self, channels):
        super().__init__()
        self.norm = group_norm(channels)
        self.query, self.key, self.value, self.out = (nn.Linear(channels, channels) for _ in range(4))

    def forward(self, x):
        h = self.norm(x).flatten(2).transpose(1, 2)
        query, key, value = (part(h).unsqueeze(1) for part in (self.query, self.key, self.value))
        h = self.out(F.scaled_dot_product_attention(query, key, value).squeeze(1))
        return (x + h.transpose(1, 2).reshape(x.shape)).mul_(0.5**0.5)


class BasicBlock(nn.Module):
    """The residual block of ResNet-18 and -34; nothing in place, since DLSM' differentiates twice."""

    def __init__(self, inputs, outputs, norm, act):
        super().__init__()
        self.act = act
        stride = 1 if inputs == outputs else 2  # the map halves where the width doubles
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), norm(outputs)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), norm(outputs)
        self.shortcut = nn.Sequential()
        if stride == 2:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs))

    def forward(self, x):
        h = self.act(self.bn1(self.conv1(x)))
        return self.act(self.bn2(self.conv2(h)) + self.shortcut(x))


def fold_batchnorm(net):
    """A copy for evaluation, each BatchNorm folded into its convolution: the same, but faster."""
    net = copy.deepcopy(net)
    for m in list(net.modules()):
        for conv, norm in (("conv1", "bn1"), ("conv2", "bn2"), ("conv", "bn"), ("0", "1")):
            if isinstance(getattr(m, norm, None), nn.BatchNorm2d):
                setattr(m, conv, nn.utils.fuse_conv_bn_eval(getattr(m, conv), getattr(m, norm)))
                setattr(m, norm, nn.Identity())
    return net.requires_grad_(False)


# ------------------------------------------------------------ 3. files

NETWORKS = {cls.__name__: cls for cls in (NCSNpp, NoisyResNet, ToyNet)}


class UserError(Exception):
    """Bad input or a run that cannot go on: shown as one line, exit code 2, no traceback."""


def write_whole(path, data):
    """Writes bytes, or what data(file) writes: `path` is always the old file or the new one, whole."""
    if callable(data):
        buffer = io.BytesIO()  # in memory first: a full disk is then an ordinary OSError
        try:
            data(buffer)
        except ValueError as error:  # what closing a half-written zip says in place of the interrupt
            raise error.__context__ if isinstance(error.__context__, KeyboardInterrupt) else error
        data = buffer.getbuffer()
    path = pathlib.Path(path)
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        error.filename, error.filename2 = str(path), None  # not the temporary file, or no file at all
        raise
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


@contextlib.contextmanager
def reading(path, what):
    """Within this block a file that cannot be read is one line of error, however it fails."""
    try:
        if zipfile.is_zipfile(path):  # torch and numpy do not look at its checksums
            with zipfile.ZipFile(path) as file:
                if damaged := file.testzip():
                    raise zipfile.BadZipFile(damaged)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old formats warn
            yield
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except Exception as error:
        trouble = f"not a readable {what}, perhaps cut off or damaged ({type(error).__name__})"
        raise UserError(f"{path}: {trouble}; get it anew, or name another") from None


def checksum(value):
    """sha256 over nested dicts and lists of tensors and plain values, in order: the identity of content."""
    digest = hashlib.sha256()

    def add(v):
        if isinstance(v, torch.Tensor):
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
    """A plain dict of tensors and plain values."""
    write_whole(path, lambda file: torch.save(checkpoint, file))


def load_checkpoint(path, device="cpu"):
    """The dict in a file, read without running any code."""
    with reading(path, "checkpoint"):
        return dict(torch.load(path, map_location=device, weights_only=True))


def load_model(path, device="cpu", kind=None):
    """The network of a checkpoint, ready to use: EMA weights, evaluation mode, frozen; also released files.

    `net.about` is what the checkpoint says of it: kind ("score" or "classifier"), settings, step.
    """
    checkpoint = load_checkpoint(path)
    try:
        if "model" in checkpoint:
            checkpoint = from_released(checkpoint)
        about = {key: checkpoint[key] for key in ("kind", "network", "config", "settings", "step")}
        weights = dict(checkpoint["weights"])
        if about["network"] == "ExactScore":
            net = ExactScore(weights["images"], weights["labels"])
        else:
            net = NETWORKS[about["network"]](**about["config"])
        if checkpoint["ema"] is not None:
            names = [name for name, _ in net.named_parameters()]
            weights.update(zip(names, checkpoint["ema"]["shadow"], strict=True))
        net.load_state_dict(weights)
    except Exception as error:  # another version's, or a stranger's: it can fail in any way
        words = f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"
        raise UserError(f"{path}: neither our checkpoint nor one of the authors' ({words})") from None
    if kind and about["kind"] != kind:
        raise UserError(f"{path}: is a {about['kind']} checkpoint, a {kind} checkpoint is needed here")
    net.about = about
    # On a CPU this layout is up to 1.2 times as fast, for gradients in x as well.
    layout = torch.channels_last if str(device) == "cpu" else torch.preserve_format
    return net.to(device, memory_format=layout).eval().requires_grad_(False)


def from_released(checkpoint):
    """A file of the authors' release as a checkpoint of ours; its entries stand in the order of ours."""
    theirs = {key.removeprefix("module."): value for key, value in checkpoint["model"].items()}
    if "all_modules.0.W" in theirs:
        kind, network, config = "score", "NCSNpp", {}
        theirs.pop("sigmas", None)
        # Sampling must use the averaged weights: a list in the order of the trainable parameters.
        trained = [key for key in theirs if not key.endswith("modules.0.W")]
        theirs.update(zip(trained, checkpoint["ema"]["shadow_params"], strict=True))
    else:
        classes = len(theirs["classifier.classifier.linear.weight"])
        kind, network = "classifier", "NoisyResNet"
        config = dict(depth=34 if classes == 100 else 18, classes=classes)
    with torch.device("meta"):  # without memory, for its names
        net = NETWORKS[network](**config)
    values = [v.T if ".NIN_" in key and v.ndim == 2 else v for key, v in theirs.items()]  # (in, out)
    settings = dict(size=32, sigma_min=0.01, sigma_max=50.0)
    if "classes" in config:  # a score model does not tell
        settings["data"] = f"cifar{config['classes']}"
    return dict(kind=kind, network=network, config=net.config, settings=settings, ema=None,
                step=checkpoint.get("step"), weights=dict(zip(net.state_dict(), values, strict=True)))
