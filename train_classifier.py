"""Stage 2: trains the noise-conditioned classifier p(y|x̃, σ) with cross-entropy, DLSM' or both, on a frozen score model.

    python train_classifier.py --loss total --lam 1       # after train_score.py

Reads runs/RUN/score.pt, writes runs/RUN/classifier-LOSS.pt with its log and its loss curve.
"""
import torch
import torch.nn.functional as F

from train_score import spread

# ---------------------------------------------------------------------------- method


def likelihood_score(classifier, x, sigma, y, alpha=1.0, renormalize=False, create_graph=False, with_log_p=False):
    """α ∇ₓ log p(y|x, σ), or with `renormalize` Eq. A1: ∇ₓ log softmax(α log p)_y = α ∇ log p − ∇ log Z(x).

    The one place where this gradient is taken: DLSM' wants its graph, guidance does not. α is a number or (B,).
    """
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        log_p = F.log_softmax(classifier(x, sigma), 1)
        alpha = torch.as_tensor(alpha, dtype=x.dtype, device=x.device)
        log_q = F.log_softmax(alpha.view(-1, 1) * log_p, 1) if renormalize else log_p
        score, = torch.autograd.grad(log_q.gather(1, y[:, None]).sum(), x, create_graph=create_graph)
    if not renormalize:
        score = score * (spread(alpha, x) if alpha.ndim else alpha)
    return (score, log_p) if with_log_p else score


def ce_loss(classifier, x, sigma, y, z):
    """L_CE (Eq. A5 with λ_CE = 1): −log p(y|x̃, σ), x̃ = x + σz; mean over the batch."""
    return F.cross_entropy(classifier(x + spread(sigma, x) * z, sigma), y)


def dlsm_loss(classifier, score_net, x, sigma, y, z, power=0):
    """L_DLSM' (Eqs. 10, A4): ½ σ^power ‖∇ log p(y|x̃) + s(x̃, σ) + z/σ‖²; MEAN over coordinates and batch.

    The paper's λ_DLSM = 1 is power 0 on CIFAR; on the moons it prints 1/σ⁴ and its code multiplies by σ⁴.
    """
    return total_loss(classifier, score_net, x, sigma, y, z, lam=0.0, power=power)


def total_loss(classifier, score_net, x, sigma, y, z, lam=1.0, power=0):
    """L_Total (Eq. 11): L_DLSM' + λ L_CE; one forward pass of the classifier serves both terms."""
    s = spread(sigma, x)
    noisy = x + s * z
    with torch.no_grad():
        target = -score_net(noisy, sigma) - z / s
    g, log_p = likelihood_score(classifier, noisy, sigma, y, create_graph=True, with_log_p=True)
    dlsm = 0.5 * (sigma**power * (g - target).square().flatten(1).mean(1)).mean()
    return dlsm + lam * F.nll_loss(log_p, y)
