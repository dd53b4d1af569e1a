"""Draws class-conditional samples: the posterior score (guidance), the paper's PC sampler, a fast Heun sampler.

    python sample.py --guidance dlsm                      # after the two training commands

Reads runs/RUN/score.pt and a classifier, writes runs/RUN/samples-GUIDANCE.npz and .png.
"""
import math

import torch

from models import UserError, sigma_at
from train_classifier import likelihood_score
from train_score import spread

# ---------------------------------------------------------------------------- method


def posterior_score(score_net, classifier=None, y=None, alpha=1.0, renormalize=False):
    """∇ log p(x|y) = s(x, σ) + α ∇ log p(y|x, σ) (Eqs. 5, 6; Eq. A2 with `renormalize`) as a function of (x, σ).

    `alpha` is a number or a function of σ. Without a classifier it is the prior score.
    """
    def score(x, sigma):
        with torch.no_grad():
            s = score_net(x, sigma)
        if classifier is None:
            return s
        a = alpha(sigma) if callable(alpha) else alpha
        return s + likelihood_score(classifier, x, sigma, y, a, renormalize)

    return score


def checked(value, step, sigma):
    """The score `value`, or an error that names step and σ where it is zero, infinite or NaN."""
    size = value.abs().amax()
    if not (math.isfinite(size) and size > 0):
        raise UserError(f"the score is {'zero' if size == 0 else 'not finite'} at step {step}, σ = {sigma:.4g}; try a smaller --alpha or more --steps")
    return value


def pc_sampler(score, x, sigmas, snr=0.16, corrector_steps=1, per_sample=False, noise=torch.randn_like):
    """Algorithm 1, in the order of the released code: at each σ_i Langevin steps, then the predictor to σ_{i+1}.

    Langevin step ε = 2 (snr ‖z‖/‖s‖)², norms averaged over the batch as released, or of each sample. Decreasing
    `sigmas` that end with 0 return the last mean without noise, else a sample at the last σ. Equal ones: Eq. 1.
    """
    sigmas = torch.as_tensor(sigmas, device=x.device, dtype=x.dtype)
    for i, (sigma, below) in enumerate(zip(sigmas, sigmas[1:])):
        level = sigma.expand(len(x))
        for _ in range(corrector_steps):
            s, z = checked(score(x, level), i, sigma), noise(x)
            norm_s, norm_z = s.flatten(1).norm(dim=1), z.flatten(1).norm(dim=1)
            if not per_sample:
                norm_s, norm_z = norm_s.mean(), norm_z.mean()
            epsilon = 2 * (snr * norm_z / norm_s) ** 2
            if per_sample:
                epsilon = spread(epsilon, x)
            x = x + epsilon * s + (2 * epsilon).sqrt() * z
        if below < sigma:
            variance = sigma**2 - below**2
            x = x + variance * checked(score(x, level), i, sigma)
            if below > 0:
                x = x + variance.sqrt() * noise(x)
    return x


def heun_sampler(score, x, sigmas, churn=0.0, noise=torch.randn_like):
    """Heun's method on the probability-flow ODE dx/dσ = −σ s(x, σ); with churn > 0 EDM's stochastic sampler.

    Churn raises σ to (1 + churn) σ with fresh noise before each step, never above the first σ. Sigmas that end with
    0 end with one Euler step, onto the denoised mean. 2 evaluations a step.
    """
    sigmas = torch.as_tensor(sigmas, device=x.device, dtype=x.dtype)

    def slope(x, sigma, step):
        return -sigma * checked(score(x, sigma.expand(len(x))), step, sigma)

    for i, (sigma, below) in enumerate(zip(sigmas, sigmas[1:])):
        if churn > 0 and i > 0:
            raised = torch.minimum((1 + churn) * sigma, sigmas[0])
            x, sigma = x + (raised**2 - sigma**2).sqrt() * noise(x), raised
        d = slope(x, sigma, i)
        ahead = x + (below - sigma) * d
        x = ahead if below == 0 else x + (below - sigma) * (d + slope(ahead, below, i)) / 2
    return x


def sigma_grid(steps, sigma_min, sigma_max, rho=None):
    """steps + 1 noise levels from σ_max over σ_min to 0: geometric (the paper's), or EDM's with ρ (7) for few steps."""
    t = torch.linspace(1, 0, steps, dtype=torch.float64)
    if rho:
        sigmas = (sigma_min ** (1 / rho) + t * (sigma_max ** (1 / rho) - sigma_min ** (1 / rho))) ** rho
    else:
        sigmas = sigma_at(t, sigma_min, sigma_max)
    return torch.cat([sigmas, sigmas.new_zeros(1)])
