"""The text of the script that a comparison's cell becomes: its training (kernel).

Tags and names are those of ``script_text``.
"""

TRAINING = '''\
# ---- training ----------------------------------------------------------------------------


def loss_of(net, batch):
    #? step {
    result = training_step(net, batch)
    return result["loss"] if isinstance(result, Mapping) else result
    #? }
    #? !step {
    inputs, targets = batch
    return $loss(net(inputs), targets)
    #? }


#? optimizer {
def make_optimizer(net, parameters, num_steps):
    """Return the optimizer, and its scheduler or None."""
    names = list(inspect.signature(optimizer).parameters)
    counted = {"num_steps": num_steps} if "num_steps" in names else {}
    made = optimizer(net if names[:1] == ["model"] else parameters, **counted)
    return made if isinstance(made, tuple) else (made, None)


#? }
#? bf16 {
def bf16_hook(state, bucket):  # under the name of torch's own, DDP refuses it on gloo
    return bf16_compress_hook(state, bucket)


#? }
#? fsdp {
def shard(net):
    """Shard each layer of a list by itself, unless it shares parameters, then all else."""
    shared, seen = set(), set()
    for _, parameter in net.named_parameters(remove_duplicate=False):
        (shared if parameter in seen else seen).add(parameter)
    for module in reversed(list(net.modules())):
        if isinstance(module, (nn.Sequential, nn.ModuleList)):
            for layer in module:
                parameters = set(layer.parameters())
                if parameters and not parameters & shared and layer is not net:
                    shard_one(layer)
    shard_one(net)


def shard_one(module):
    fully_shard(module, reshard_after_forward=$reshard)
    module.set_force_sum_reduction_for_comms(dist.get_backend() == "gloo")  # it cannot average


#? }
#? local {
@torch.no_grad()
def average(tensors):
    for tensor in tensors:
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size()


#? }
def run_training(device):
    rank, world_size, on_gpu = dist.get_rank(), dist.get_world_size(), device.type == "cuda"
    if args.batch_size % world_size:
        sys.exit(f"--batch-size {args.batch_size} is not a multiple of the {world_size} processes.")
    (samples, collate), held_out = load_split("train"), load_split("test")
    sampler = DistributedSampler(samples, seed=args.seed, drop_last=True)
    size = args.batch_size // world_size
    steps_per_epoch = math.ceil(len(sampler) / size)
    num_steps = max(1, round(args.epochs * steps_per_epoch))
    save_every = max(1, round(args.save_every * steps_per_epoch))
    log_every = args.log_every or max(1, num_steps // 10)

    seed_everything(args.seed)
    plain = model()
    plain = plain.to(device).train()
    seed_everything(args.seed + 1 + rank)  # dropout differs between ranks
    net = plain  #? local fsdp
    shard(net)  #? fsdp
    #? ddp zero {
    net = DistributedDataParallel(plain, device_ids=[device] if on_gpu else None$wrapped)
    #? }
    net.register_comm_hook(None, fp16_compress_hook)  #? fp16
    net.register_comm_hook(None, bf16_hook)  #? bf16
    parameters = [parameter for parameter in plain.parameters() if parameter.requires_grad]
    #? optimizer {
    optim, scheduler = make_optimizer(plain, parameters, num_steps)
    #? }
    #? !optimizer {
    optim, scheduler = torch.optim.SGD(parameters, args.lr, args.momentum), None
    #? }
    #? zero {
    # Each process keeps the state of a part of the parameters; the settings are the same.
    whole, kind = optim, type(optim)
    takes = inspect.signature(kind).parameters
    settings = {name: value for name, value in whole.defaults.items() if name in takes}
    optim = ZeroRedundancyOptimizer(whole.param_groups, lambda groups: kind(groups, **settings))
    #? }
    step = load_checkpoint(plain, optim, scheduler)
    whole.param_groups = optim.param_groups  # which a scheduler changes  #? zero

    while step < num_steps:
        epoch, first = divmod(step, steps_per_epoch)
        sampler.set_epoch(epoch)
        chosen = list(BatchSampler(sampler, size, drop_last=False))
        chosen = chosen[first : first + num_steps - step]
        #? !accumulate {
        for batch in batches_from(samples, collate, chosen):
            optim.zero_grad()
            with torch.autocast(device.type, torch.bfloat16):  #? amp
                error = loss_of(net, to_device(batch, device))  #? amp
            error = loss_of(net, to_device(batch, device))  #? !amp
            error.backward()
        #? }
        #? accumulate {
        most = args.accumulate
        split = [torch.tensor(each).tensor_split(min(most, len(each))) for each in chosen]
        every_part = [part.tolist() for parts in split for part in parts]
        fetched = iter(batches_from(samples, collate, every_part))
        for parts in split:
            optim.zero_grad()
            error = 0.0
            for number, numbers in enumerate(parts, start=1):
                batch, is_last = to_device(next(fetched), device), number == len(parts)
                net.set_requires_gradient_sync(is_last)  #? fsdp
                with nullcontext() if is_last else net.no_sync():  #? ddp zero
                with nullcontext():  #? local fsdp
                    with torch.autocast(device.type, torch.bfloat16):  #? amp
                        part = loss_of(net, batch)  #? amp
                    part = loss_of(net, batch)  #? !amp
                    part = part * (len(numbers) / sum(map(len, parts)))
                    part.backward()
                error += part.detach()
        #? }
            #? clip {
            trained = [each for group in optim.param_groups for each in group["params"]]
            nn.utils.clip_grad_norm_(trained, args.clip)
            #? }
            optim.step()
            step += 1
            if scheduler is not None:
                scheduler.step()
            #? local {
            if step % args.every == 0:
                average(parameters)
            #? }
            if rank == 0 and (step % log_every == 0 or step == num_steps):
                print(f"step {step} of {num_steps}: loss {error.item():.8f}", flush=True)
            if step % save_every == 0 and step < num_steps:
                save_checkpoint(step, step // steps_per_epoch, plain, optim, scheduler)

    average(parameters)  #? local
    save_checkpoint(step, step // steps_per_epoch, plain, optim, scheduler)
    weights = get_model_state_dict(plain, options=StateDictOptions(full_state_dict=True))  #? fsdp
    if rank == 0:
        plain = model().to(device)  #? fsdp
        plain.load_state_dict(weights)  #? fsdp
        print(f"final training loss {evaluate_model(plain, samples, collate, device)['loss']:.8f}")
        for name, value in evaluate_model(plain, *held_out, device, is_held_out=True).items():
            print(f"held-out {name} {value:.8f}", flush=True)


@torch.no_grad()
def evaluate_model(net, samples, collate, device, is_held_out=False):
    """Return means over a split, in evaluation mode: the loss and what the cell measures."""
    net.eval()
    num = min(len(samples), MAX_EVALUATED)
    parts = [part.tolist() for part in (torch.arange(num) * len(samples) // num).split(512)]
    totals = {}
    outputs, targets = [], []  #? metric
    for part, batch in zip(parts, batches_from(samples, collate, parts)):
        batch, found = to_device(batch, device), {}
        if is_held_out:  #? validation
            found = named(validation_step, validation_step(net, batch))  #? validation
        if "loss" not in found:
            with torch.enable_grad():
                found["loss"] = loss_of(net, batch).item()
        for name, value in found.items():
            totals[name] = totals.get(name, 0.0) + float(value) * len(part)
        #? metric {
        if is_held_out:
            outputs.append(net(batch[0]).cpu())
            targets.append(batch[1].cpu())
        #? }
    means = {name: total / num for name, total in totals.items()}
    #? metric {
    if is_held_out:
        means |= named(metric, metric(torch.cat(outputs), torch.cat(targets)))
    #? }
    return means


#? metric validation {
def named(function, result):
    name = getattr(function, "__name__", type(function).__name__)
    return dict(result) if isinstance(result, Mapping) else {name: float(result)}


#? }
def init_process_group(backend):
    """Take rank, world size and address from torchrun's environment.

    Where it starts workers again, torchrun keeps its store, with the addresses of those before.
    So each start on one host has a part of the store of its own.
    """
    store, rank, world_size = next(dist.rendezvous("env://"))
    if int(os.environ.get("GROUP_WORLD_SIZE", 1)) == 1:
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    elif rank == 0 and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0:
        if os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1":
            print("A restart on several hosts needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.")
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)


def main():
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    init_process_group("nccl" if on_gpu else "gloo")
    try:
        run_training(device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # With gloo, torch sometimes aborts a process at its normal end ("terminate called without
    # an active exception"), and torchrun then reports a failure.
    sys.stdout.flush()
    os._exit(0)
'''
