"""Models that nobody here wrote: small configurations of transformers, timm, torchvision and MONAI, random weights.

    cd HERE; P=outside-venv/bin/python      (sees torch 2.13.0 of CHECKOUT/.venv; never install into that)
    PYTHONPATH=HEREYOURS/src OMP_NUM_THREADS=1 $P outside_models.py                     every model, both batches
    PYTHONPATH=HEREYOURS/src OMP_NUM_THREADS=1 $P outside_models.py bert gpt2 --batches 16 64 --methods plain fedpact vmap hooks
    PYTHONPATH=... $P outside_models.py --way-only            does the kernel take it, by which way, and why not (no timing)
    PYTHONPATH=... $P outside_models.py --child NAME BATCH ...   one model in this process, prints JSON

In Python: `from outside_models import MODELS; module, x, y, loss = MODELS["bert"](16)`. `loss(outputs, y) -> [B]` is one of
fedpact.losses. PYTHONPATH says which worktree's fedpact is tried.
"""
import argparse, importlib, inspect, json, logging, os, statistics as st, subprocess, sys, time, warnings
os.environ.setdefault("OMP_NUM_THREADS", "1"); os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
warnings.filterwarnings("ignore"); logging.disable(logging.WARNING)
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import torch, shim  # shim: before torchvision and timm
import torch.nn.functional as F
from torch import nn

VOCAB, T, CLASSES, CLIP = 200, 64, 10, 1.0

def losses():
    from fedpact.losses import cross_entropy, pixel_entropy
    return cross_entropy, pixel_entropy

class Pick(nn.Module):
    """A Hugging Face model whose output is one tensor. pick: of the output, or its logits."""
    def __init__(s, model, pick=lambda out: out.logits, embed=False):
        super().__init__(); s.model, s.pick = model, pick
    positions = False  # Opacus' hooks want every embedding's ids to have the batch in front
    def more(s, x): return {"position_ids": torch.arange(x.shape[1]).expand_as(x)} if s.positions else {}
    def forward(s, x): return s.pick(s.model(x, return_dict=True, **s.more(x)))

class Masked(Pick):
    """The same with a mask of ones, without which transformers' decoders look for packed sequences."""
    def forward(s, x): return s.pick(s.model(x, attention_mask=torch.ones_like(x), return_dict=True, **s.more(x)))

class Mean(nn.Module):
    """An encoder, the mean over tokens, a linear head."""
    def __init__(s, model, width): super().__init__(); s.model, s.head = model, nn.Linear(width, CLASSES)
    def forward(s, x): return s.head(s.model(x)[0].mean(1))

def tokens(B, classes=CLASSES, length=T): return torch.randint(3, VOCAB, (B, length)), torch.randint(0, classes, (B,))
def images(B, size=32, channels=3): return torch.randn(B, channels, size, size), torch.randint(0, CLASSES, (B,))
def pixels(B, size=32, channels=1, dims=2, classes=2):
    shape = (size,) * dims
    return torch.randn(B, channels, *shape), torch.randint(0, classes, (B, *shape))
def following(B): x = torch.randint(3, VOCAB, (B, T)); return x, x.roll(-1, 1)

def hf(make, data=tokens, wrap=Pick):
    def build(B):
        import transformers
        torch.manual_seed(0)
        module = wrap(make(transformers)).train()
        return module, *data(B), losses()[0]
    return build

def seen(make, data=images, pixel=False):
    def build(B):
        torch.manual_seed(0)
        return make().train(), *data(B), losses()[int(pixel)]
    return build

NODROP = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
def bert(t, **kw): return t.BertForSequenceClassification(t.BertConfig(vocab_size=VOCAB, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512, max_position_embeddings=T, num_labels=CLASSES, **{**NODROP, **kw}))
def distilbert(t): return t.DistilBertForSequenceClassification(t.DistilBertConfig(vocab_size=VOCAB, dim=128, n_layers=2, n_heads=4, hidden_dim=512, max_position_embeddings=T, dropout=0., attention_dropout=0., seq_classif_dropout=0., num_labels=CLASSES))
def roberta(t): return t.RobertaForSequenceClassification(t.RobertaConfig(vocab_size=VOCAB, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512, max_position_embeddings=T + 2, num_labels=CLASSES, pad_token_id=1, **NODROP))
def gpt2(t): return t.GPT2LMHeadModel(t.GPT2Config(vocab_size=VOCAB, n_embd=128, n_layer=2, n_head=4, n_positions=T, resid_pdrop=0., embd_pdrop=0., attn_pdrop=0., use_cache=False))
def llama(t): return t.LlamaForCausalLM(t.LlamaConfig(vocab_size=VOCAB, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=344, max_position_embeddings=T, use_cache=False))
def t5(t): return t.T5EncoderModel(t.T5Config(vocab_size=VOCAB, d_model=128, d_kv=32, d_ff=512, num_layers=2, num_heads=4, dropout_rate=0., use_cache=False))
def vit(t, **kw): return t.ViTForImageClassification(t.ViTConfig(image_size=32, patch_size=4, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512, num_labels=CLASSES, **{**NODROP, **kw}))
def hfresnet(t):
    m = t.ResNetForImageClassification(t.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32, 64], depths=[1, 1, 1], layer_type="basic", num_labels=CLASSES))
    return grouped(m)
def mamba(t): return t.MambaForCausalLM(t.MambaConfig(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2, state_size=8, use_cache=False))
def wav2(t): return t.Wav2Vec2ForSequenceClassification(t.Wav2Vec2Config(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, conv_dim=(32, 32, 32), conv_stride=(5, 2, 2), conv_kernel=(10, 3, 3), num_feat_extract_layers=3, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, hidden_dropout=0., attention_dropout=0., feat_proj_dropout=0., activation_dropout=0., final_dropout=0., layerdrop=0., apply_spec_augment=False, classifier_proj_size=32, num_labels=CLASSES))

def grouped(module, groups=8):
    """GroupNorm in place of each BatchNorm, as everybody does for private training."""
    for name, child in module.named_children():
        if isinstance(child, (nn.BatchNorm2d, nn.BatchNorm3d)):
            n = child.num_features; g = groups
            while n % g: g -= 1
            setattr(module, name, nn.GroupNorm(g, n))
        else: grouped(child, groups)
    return module
def gn(n):
    g = 8
    while n % g: g -= 1
    return nn.GroupNorm(g, n)

def from_timm(name, **kw):
    def make():
        import timm
        return timm.create_model(name, pretrained=False, num_classes=CLASSES, **kw)
    return make
def timm_gn(name, **kw): return lambda: grouped(from_timm(name, **kw)())
def tv(name, size=None, **kw):
    def make():
        import torchvision
        return getattr(torchvision.models, name)(weights=None, num_classes=CLASSES, **kw)
    return make
def tv_vit():
    from torchvision.models.vision_transformer import VisionTransformer
    return VisionTransformer(32, 4, 2, 4, 128, 512, num_classes=CLASSES)
def tv_swin():
    from torchvision.models.swin_transformer import SwinTransformer
    return SwinTransformer([2, 2], 32, [1, 1], [2, 4], [4, 4], stochastic_depth_prob=0., num_classes=CLASSES)
def monai(name, **kw):
    def make():
        import monai.networks.nets as nets
        return getattr(nets, name)(**kw)
    return make
UNET = dict(spatial_dims=2, in_channels=1, out_channels=2, channels=(8, 16, 32), strides=(2, 2), num_res_units=1)


MODELS = {
    "bert": hf(bert), "bert-eager": hf(lambda t: bert(t, attn_implementation="eager")), "bert-dropout": hf(lambda t: bert(t, hidden_dropout_prob=.1, attention_probs_dropout_prob=.1)),
    "distilbert": hf(distilbert), "roberta": hf(roberta),
    "gpt2": hf(gpt2, following), "gpt2-mask": hf(gpt2, following, Masked), "llama-mask": hf(llama, following, Masked),
    "bert-mask": hf(bert, tokens, Masked), "llama": hf(llama, following), "t5-encoder": hf(t5, tokens, lambda m: Mean(m, 128)),
    "hf-vit": hf(vit, images), "hf-resnet-gn": hf(hfresnet, images), "mamba": hf(mamba, following),
    "wav2vec2": hf(wav2, lambda B: (torch.randn(B, 2000), torch.randint(0, CLASSES, (B,)))),
    "timm-resnet18-gn": seen(from_timm("resnet18", norm_layer="groupnorm")), "timm-resnet10t-gn": seen(timm_gn("resnet10t")),
    "timm-convnext-small": seen(from_timm("convnext_atto", depths=(1, 1, 2, 1), dims=(16, 32, 64, 128)), ),
    "timm-vit": seen(from_timm("vit_tiny_patch16_224", img_size=32, patch_size=4, embed_dim=128, depth=2, num_heads=4)),
    "timm-mobilenetv2-gn": seen(timm_gn("mobilenetv2_050")), "timm-efficientnet-gn": seen(timm_gn("efficientnet_lite0", )),
    "timm-mixer": seen(lambda: _mixer()),
    "timm-swin": seen(from_timm("swin_tiny_patch4_window7_224", img_size=32, patch_size=2, window_size=4, embed_dim=32, depths=(2, 2), num_heads=(2, 4), drop_path_rate=0.)),
    "tv-resnet18-gn": seen(tv("resnet18", norm_layer=gn)), "tv-resnet18-gn-64px": seen(tv("resnet18", norm_layer=gn), lambda B: images(B, 64)),
    "tv-mobilenetv3-gn": seen(tv("mobilenet_v3_small", norm_layer=gn)), "tv-squeezenet": seen(tv("squeezenet1_1"), lambda B: images(B, 64)),
    "tv-vit": seen(tv_vit), "tv-swin": seen(tv_swin), "tv-densenet-gn": seen(lambda: grouped(_densenet())),
    "monai-unet-instance": seen(monai("UNet", **UNET), pixels, True),
    "monai-unet-group": seen(monai("UNet", **UNET, norm=("GROUP", {"num_groups": 2})), pixels, True),
    "monai-unet-3d": seen(monai("UNet", **{**UNET, "spatial_dims": 3}), lambda B: pixels(B, 16, dims=3), True),
    "monai-basicunet": seen(monai("BasicUNet", spatial_dims=2, in_channels=1, out_channels=2, features=(8, 8, 16, 32, 64, 8)), pixels, True),
    "monai-segresnet": seen(monai("SegResNet", spatial_dims=2, init_filters=8, in_channels=1, out_channels=2, blocks_down=(1, 1), blocks_up=(1,)), pixels, True),
    "monai-unetr": seen(monai("UNETR", in_channels=1, out_channels=2, img_size=32, feature_size=8, hidden_size=64, mlp_dim=128, num_heads=4, spatial_dims=2), pixels, True),
}
def _mixer():
    from timm.models import mlp_mixer as mm
    return mm.MlpMixer(CLASSES, img_size=32, patch_size=4, num_blocks=2, embed_dim=64)
def _densenet():
    import torchvision
    return torchvision.models.DenseNet(8, (2, 2, 2), 16, num_classes=CLASSES)

METHODS = ["plain", "fedpact", "vmap", "hooks", "ghost"]

def kernel_class():
    """The one place that knows where the kernel is."""
    for place in ("fedpact.persample.kernel", "fedpact.per_sample.kernel"):
        try: return importlib.import_module(place).PerSampleKernel
        except ModuleNotFoundError: pass
    raise SystemExit("no kernel")

def reason(kernel, x, y):
    """Why the traced way does not take it (the first operation found), and whether vmap or a loop does it instead."""
    try:
        from fedpact.params import all_digits
        with all_digits(kernel.model.vector):
            way = kernel._passes._traced(x, y)
        if type(way).__name__ == "Graph": return ""
        return f"{getattr(way, '_why', '?')}; records by {'vmap' if getattr(way, '_by_vmap', None) else 'a loop'} of {getattr(way, 'step', '?')}"
    except Exception as e: return f"(no reason found: {type(e).__name__}: {e})"[:300]

def plain(make):
    m, x, y, loss = make(); o = torch.optim.SGD([p for p in m.parameters() if p.requires_grad], .01)
    def f(): o.zero_grad(); loss(m(x), y).mean().backward(); o.step()
    return f
def fedpact(make):
    from fedpact.params import FlatModel
    m, x, y, loss = make(); k = kernel_class()(FlatModel(m), loss)
    t = time.perf_counter(); way = k.way(x, y); took = time.perf_counter() - t
    def f(): return k.clipped_sum(x, y, CLIP)
    f.info = {"way": way, "trace_s": round(took, 1), "why": reason(k, x, y) if way == "records" else "", "d": k.model.size}
    return f
def clipped(grads, norms):
    c = (CLIP / (norms + 1e-6)).clamp(max=1)
    return [torch.einsum("i,i...->...", c, g) for g in grads]
def vmapped(make):
    from torch.func import functional_call, grad, vmap
    m, x, y, loss = make(); ps = {k: v.detach() for k, v in m.named_parameters() if v.requires_grad}
    def l(p, a, b): return loss(functional_call(m, p, (a[None],)), b[None]).sum()
    gf = vmap(grad(l), in_dims=(None, 0, 0), randomness="different")
    def f():
        g = gf(ps, x, y); n = torch.stack([v.flatten(1).norm(dim=1) for v in g.values()]).norm(dim=0)
        return clipped(g.values(), n)
    return f
def opacus(mode):
    def build(make):
        from opacus import GradSampleModule
        from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import GradSampleModuleFastGradientClipping as FG
        from opacus.validators import ModuleValidator
        m, x, y, loss = make()
        for one in m.modules():
            if getattr(one, "inplace", False) is True: one.inplace = False  # as Opacus' documents say
        if isinstance(m, Pick): m.positions = "position_ids" in inspect.signature(m.model.forward).parameters
        if any(isinstance(l, (nn.LSTM, nn.MultiheadAttention)) for l in m.modules()): m = ModuleValidator.fix(m)
        if mode == "hooks":
            g = GradSampleModule(m)
            def f():
                g.zero_grad(); loss(g(x), y).sum().backward()
                ps = [p for p in g.parameters() if p.requires_grad and p.grad_sample is not None]
                n = torch.stack([p.grad_sample.flatten(1).norm(dim=1) for p in ps]).norm(dim=0)
                out = clipped([p.grad_sample for p in ps], n)
                for p in ps: p.grad_sample = None
                return out
            return f
        g = FG(m, max_grad_norm=CLIP, use_ghost_clipping=True)
        def f():
            l = loss(g(x), y); g.zero_grad(); l.sum().backward(retain_graph=True)
            c = g.get_clipping_coef(); g.zero_grad(); g.disable_hooks(); (c * l).sum().backward(); g.enable_hooks()
        return f
    return build
BUILD = {"plain": plain, "fedpact": fedpact, "vmap": vmapped, "hooks": opacus("hooks"), "ghost": opacus("ghost")}

def child(name, batch, methods, seconds):
    torch.set_num_threads(1)
    def make(): return MODELS[name](batch)
    fs, out = {}, {"name": name, "batch": batch}
    for m in methods:
        if m == "way":
            try: out["info"] = fedpact(make).info
            except Exception as e: out["refused"] = f"{type(e).__name__}: {str(e)[:600]}"
            continue
        try: f = BUILD[m](make); f(); t = time.process_time(); f(); out.setdefault("first", {})[m] = time.process_time() - t; fs[m] = f
        except Exception as e: out.setdefault("failed", {})[m] = f"{type(e).__name__}: {str(e).strip().splitlines()[0] if str(e).strip() else ''}"[:600 if m == "fedpact" else 160]
        if m in fs and hasattr(fs[m], "info"): out["info"] = fs[m].info
    took, T0 = {m: [] for m in fs}, time.time()
    while fs and (time.time() - T0 < seconds or len(took["plain"]) < 2) and len(took["plain"]) < 15:
        for m, f in fs.items():
            if len(took[m]) >= 2 and out["first"][m] > 1.5: continue   # slow ones twice
            t = time.process_time(); f(); took[m].append(time.process_time() - t)
    if fs:
        base = st.median(took["plain"])
        out["plain_ms"] = round(base * 1e3, 1)
        out["ratio"] = {m: round(st.median([a / b for a, b in zip(v, took["plain"])]), 2) for m, v in took.items() if m != "plain"}
    print("JSON " + json.dumps(out), flush=True)

def main():
    a = argparse.ArgumentParser(); a.add_argument("names", nargs="*"); a.add_argument("--batches", nargs="+", type=int, default=[16, 64])
    a.add_argument("--methods", nargs="+", default=["plain", "fedpact", "vmap", "hooks"]); a.add_argument("--seconds", type=float, default=8)
    a.add_argument("--timeout", type=float, default=150); a.add_argument("--way-only", action="store_true"); a.add_argument("--child", action="store_true")
    o = a.parse_args()
    if o.child: return child(o.names[0], o.batches[0], o.methods, o.seconds)
    for name in o.names or MODELS:
        for batch in ([16] if o.way_only else o.batches):
            cmd = [sys.executable, __file__, "--child", name, "--batches", str(batch), "--seconds", str(o.seconds), "--methods", *(["way"] if o.way_only else o.methods)]
            try: done = subprocess.run(cmd, capture_output=True, text=True, timeout=o.timeout)
            except subprocess.TimeoutExpired: print(f"{name:22s} B={batch:<3d} TIMEOUT {o.timeout:.0f} s", flush=True); continue
            lines = [l for l in done.stdout.splitlines() if l.startswith("JSON ")]
            if not lines: print(f"{name:22s} B={batch:<3d} BUILD FAILED {done.stderr.strip().splitlines()[-1][:300] if done.stderr.strip() else done.returncode}", flush=True); continue
            r = json.loads(lines[-1][5:]); i = r.get("info", {})
            ratios = " ".join(f"{m} {v:6.2f}" for m, v in r.get("ratio", {}).items())
            print(f"{name:22s} B={batch:<3d} d={i.get('d', 0):>9,} way={i.get('way', '-'):8s} trace {i.get('trace_s', '-')} s  plain {r.get('plain_ms', '-')} ms  {ratios}", flush=True)
            for m, why in r.get("failed", {}).items(): print(f"    {m} FAILED: {why}", flush=True)
            if r.get("refused"): print(f"    REFUSED: {r['refused']}", flush=True)
            if i.get("why"): print(f"    why: {i['why']}", flush=True)

if __name__ == "__main__": main()
