// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The calls of one function: an fentry and an fexit program. Each function is an
 * object of its own, specialised through .rodata, so the verifier removes
 * whatever it does not use. The targets are set at load time.
 *
 * The key is the call's trampoline frame. An fentry and an fexit program on one
 * function run in one trampoline invocation and get the same context pointer,
 * an address on that call's own stack: unique among all calls in flight,
 * whatever the task, the CPU, or the depth of nesting.
 *
 * Only the call that owns a key ever touches the slot that holds it. What CPUs
 * contend for is the claim of a free slot, so the claim alone is a
 * compare-and-swap.
 */
#include "kernel.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include "shared.bpf.h"
#include "inflight.bpf.h"

/* Which of the span's functions it is. */
const volatile __u32 part = 0;
/* Number of argument words; the return value lies behind them. */
const volatile __u32 arg_words = 0;
/* The argument word that is a struct sk_buff *; >= arg_words: there is none. */
const volatile __u32 skb_word = 0;
/* The word of which the fingerprint is made; >= arg_words: there is none. */
const volatile __u32 fingerprint_word = 0;
/* Non-zero where the function returns a value. */
const volatile __u32 returns = 0;
/* Only calls that meet this are measured; enum condition. */
const volatile __u32 condition = 0;
/* The word of the argument that it is about. */
const volatile __u32 condition_word = 0;
/* The netfilter hook (NF_INET_...) that CONDITION_NF_HOOK asks for. */
const volatile __u32 nf_hook = 0;

enum condition {
	CONDITION_NONE,
	CONDITION_TC_INGRESS, /* the packet came in by tc */
	CONDITION_TC_EGRESS,
	CONDITION_NF_HOOK,    /* the struct nf_hook_state is of one hook of IPv4 or IPv6 */
};

/*
 * A struct only gets into the object's type information, with which the Rust
 * side compares its own layout, by way of a global of its type.
 */
const volatile struct dwell_record record_layout = {};

/* Read at the start: by the exit the callee may have freed the packet. */
static __always_inline __u32 skb_len(const __u64 *ctx)
{
	struct sk_buff *skb;

	if (skb_word >= arg_words)
		return 0;
	skb = (struct sk_buff *)ctx_word(ctx, skb_word);
	return skb ? skb->len : 0;
}

static __always_inline int is_wanted(const __u64 *ctx)
{
	const struct nf_hook_state *hook;
	const struct sk_buff *skb;
	int ingress;

	switch (condition) {
	case CONDITION_TC_INGRESS:
	case CONDITION_TC_EGRESS:
		skb = (const struct sk_buff *)ctx_word(ctx, condition_word);
		if (!skb)
			return 0;
		ingress = BPF_CORE_READ_BITFIELD(skb, tc_at_ingress);
		return ingress == (condition == CONDITION_TC_INGRESS);
	case CONDITION_NF_HOOK:
		hook = (const struct nf_hook_state *)ctx_word(ctx, condition_word);
		return hook && hook->hook == nf_hook && (hook->pf == NFPROTO_IPV4 || hook->pf == NFPROTO_IPV6);
	}
	return 1;
}

/*
 * A value that is the same at both ends of a call, and mostly another in
 * another call: which thread, and what it works on. Where an exit and then a
 * start were skipped by the kernel's recursion guard, the stale start is
 * recognised by it. Mostly: a thread may well call the function with the same
 * argument again, see is_certain().
 */
static __always_inline __u64 fingerprint(const __u64 *ctx, __u32 tid)
{
	__u32 argument = 0;

	if (fingerprint_word < arg_words)
		argument = address(ctx_word(ctx, fingerprint_word));
	return (__u64)tid << 32 | argument;
}

/*
 * How often a task has been switched out: what stays the same over a call was
 * on its CPU all the time.
 */
static __always_inline __u16 switches(const struct task_struct *task)
{
	return task ? task->nvcsw + task->nivcsw : 0;
}

static __always_inline struct run run_of(const __u64 *ctx, const struct task_struct *task)
{
	__u32 cpu = bpf_get_smp_processor_id();
	/* User space's tid; 0 on every CPU's idle task. */
	__u32 tid = task ? (__u32)task->pid : (__u32)bpf_get_current_pid_tgid();

	return (struct run){
		.ctx = ctx,
		.task = task,
		.key = address((__u64)ctx),
		.fingerprint = fingerprint(ctx, tid),
		.counters = counters_of(cpu),
		.cpu = cpu,
		.switches = switches(task),
	};
}

/*
 * Whether the frame is on the task's own stack, not on the CPU's interrupt
 * stack. Stacks are larger on some kernels, which only means less certainty.
 */
static __always_inline int is_on_own_stack(const struct run *run)
{
	const __u64 smallest_stack = 16384;

	return run->key - address((__u64)run->task->stack) < smallest_stack;
}

/*
 * Whether the start can only be this call's own.
 *
 * A stale start can be taken for it only where this call's entry was skipped,
 * and that happens only if something was stopped inside the entry program on
 * this CPU: another task, which was preempted there, or this one, on top of
 * which we run in an interrupt. A stale start of the other case was left by
 * this task before the preemption, so it has been switched out since. And in an
 * interrupt the frame is on another stack.
 *
 * What isn't certain is for the reader to decide, by what the kernel skipped.
 */
static __always_inline int is_certain(const struct run *run, const struct dwell_start *start)
{
	/* No kernel that lacks the pointer skips anything. */
	if (!run->task)
		return 1;
	return start->switches == run->switches && is_on_own_stack(run);
}

static __always_inline void emit(const struct run *run, const struct dwell_start *start, __u64 now)
{
	struct dwell_record *r = bpf_ringbuf_reserve(&dwell_ring, sizeof(*r), 0);
	const __u64 *ctx = run->ctx;

	if (!r) {
		count(&run->counters->ring_dropped);
		return;
	}
	r->start_ns = start->ns;
	r->latency_ns = now - start->ns;
	r->ret = returns ? ctx_word(ctx, arg_words) : 0;
	r->skb = skb_word < arg_words ? ctx_word(ctx, skb_word) : 0;
	r->span = span;
	r->part = part;
	r->cpu_start = start->cpu;
	r->cpu_end = run->cpu;
	r->len = start->len;
	r->suspect = !is_certain(run, start);
	identify(r, run->task);
	bpf_ringbuf_submit(r, wake_flag());
}

static __always_inline void finish(const struct run *run, const struct dwell_start *start, __u64 now)
{
	/*
	 * Another call's start (see fingerprint()), or a clock that went
	 * backwards, which the kernel's fast clock may across an NMI: no
	 * latency is better than a wrong one.
	 */
	if (start->fingerprint != run->fingerprint || now < start->ns) {
		count(&run->counters->mismatched);
		return;
	}
	if (is_expired(start, now)) {
		count(&run->counters->expired);
		return;
	}
	count(&run->counters->completed);
	emit(run, start, now);
}

static __always_inline void no_start(const struct run *run)
{
	/* Under a condition it may be a call that isn't wanted. */
	if (condition == CONDITION_NONE)
		count(&run->counters->unmatched);
}

static __always_inline void start_in_hash(const struct run *run, __u32 len)
{
	__u64 key = run->key;
	struct dwell_start empty = {}, *start;
	long exists;

	/* Before it can be found, so that who looks for it doesn't leave it out. */
	add(&state.overflow_live, 1);
	exists = bpf_map_update_elem(&dwell_overflow, &key, &empty, BPF_NOEXIST);
	if (exists)
		add(&state.overflow_live, -1);
	/* Filled in place, so that the map's own cost lies outside the span. */
	start = bpf_map_lookup_elem(&dwell_overflow, &key);
	if (!start) {
		count(&run->counters->untracked);
		return;
	}
	if (exists)
		count(&run->counters->overwritten);
	fill(start, run, len);
	seal(start, key);
}

/* Of a start that lost its exit. */
static __always_inline void overwrite(const struct run *run, const struct dwell_start *stale)
{
	if (max_age_ns && is_expired(stale, bpf_ktime_get_ns()))
		count(&run->counters->expired);
	else
		count(&run->counters->overwritten);
}

/*
 * A start that still holds this very frame lost its exit, as happens to calls
 * in flight when somebody attaches to or detaches from the function: the frame
 * is a new call's now. It is looked for in both stores.
 */
SEC("fentry")
int call_entry(__u64 *ctx)
{
	struct dwell_slot *set, *slot;
	struct dwell_start stale;
	struct run run;
	int wanted;

	if (!is_on())
		return 0;
	run = run_of(ctx, bpf_get_current_task_btf());
	if (state.overflow_live && take_from_hash(&run, &stale))
		overwrite(&run, &stale);
	set = set_of(run.key);
	slot = find(set, run.key);
	if (slot)
		overwrite(&run, &slot->start);
	/* A call that isn't wanted must not leave its exit a stale start either. */
	wanted = is_wanted(ctx);
	if (!wanted) {
		if (slot)
			release(slot);
		return 0;
	}
	count(&run.counters->started);
	if (!slot)
		slot = claim(set, run.key);
	if (slot)
		fill(&slot->start, &run, skb_len(ctx));
	else
		start_in_hash(&run, skb_len(ctx));
	return 0;
}

SEC("fexit")
int call_exit(__u64 *ctx)
{
	__u64 now = bpf_ktime_get_ns();
	struct dwell_slot *slot;
	struct dwell_start start;
	struct run run;

	if (!is_on())
		return 0;
	run = run_of(ctx, bpf_get_current_task_btf());
	slot = find(set_of(run.key), run.key);
	if (slot) {
		start = slot->start;
		release(slot);
		finish(&run, &start, now);
	} else if (state.overflow_live && take_from_hash(&run, &start)) {
		finish(&run, &start, now);
	} else {
		no_start(&run);
	}
	return 0;
}

/*
 * The same for kernels before 5.12, which have neither compare-and-swap nor
 * bpf_get_current_task_btf(), and no recursion guard that could skip a program.
 */
SEC("fentry")
int call_entry_hash(__u64 *ctx)
{
	struct dwell_start stale;
	struct run run;

	if (!is_on())
		return 0;
	run = run_of(ctx, 0);
	if (!is_wanted(ctx)) {
		if (take_from_hash(&run, &stale))
			overwrite(&run, &stale);
		return 0;
	}
	count(&run.counters->started);
	start_in_hash(&run, skb_len(ctx));
	return 0;
}

SEC("fexit")
int call_exit_hash(__u64 *ctx)
{
	__u64 now = bpf_ktime_get_ns();
	struct dwell_start start;
	struct run run;

	if (!is_on())
		return 0;
	run = run_of(ctx, 0);
	if (take_from_hash(&run, &start))
		finish(&run, &start, now);
	else
		no_start(&run);
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
