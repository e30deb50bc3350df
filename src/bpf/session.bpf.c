// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The calls of one function by an fsession program, from Linux 7.0 on: one program
 * that runs at entry and exit, with a word, the cookie, that lies in the call's own
 * frame. The kernel clears it for each call, so what the exit finds in it is this
 * call's own start, or nothing. Nothing has to be looked up, and no pair is in doubt.
 *
 * An object of its own, because the two kernel functions take type information to
 * load anything beside them.
 */
#include "kernel.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include "call.bpf.h"

extern _Bool bpf_session_is_return(void *ctx) __ksym __weak;
extern __u64 *bpf_session_cookie(void *ctx) __ksym __weak;

static __always_inline struct run run_of(const __u64 *ctx, const struct task_struct *task)
{
	__u32 cpu = bpf_get_smp_processor_id();

	return (struct run){
		.ctx = ctx,
		.task = task,
		.key = key_of_frame(ctx),
		.stint = switches_so_far(),
		.counters = counters_of(cpu),
		.cpu = cpu,
	};
}

/*
 * The cookie of a call that isn't measured. 0 is that of one whose entry was
 * skipped; any other is the time, or, where more than that is kept, says where.
 */
#define NOT_MEASURED 2
#define IN_HASH 4
#define NOWHERE 6
#define IN_TABLE 1 /* this bit, and the slot's offset; times have it as well, but are never asked */

static __always_inline void no_own_start(const struct run *run, __u64 cookie)
{
	no_start(run);
	if (cookie != NOT_MEASURED)
		count(&run->counters->unseen);
}

/* Where nothing but the time has to be kept, the cookie is enough. */
SEC("fsession")
int call_session(__u64 *ctx)
{
	__u64 *cookie = bpf_session_cookie(ctx);
	struct subject subject;
	struct waiting ended;
	struct run run;
	__u64 now;

	if (!bpf_session_is_return(ctx)) {
		if (!probe_on || !is_wanted(ctx, &subject)) {
			*cookie = NOT_MEASURED;
			return 0;
		}
		count(&counters_of(bpf_get_smp_processor_id())->started);
		*cookie = bpf_ktime_get_ns();
		return 0;
	}
	now = bpf_ktime_get_ns();
	run = run_of(ctx, 0);
	ended.start = (struct dwell_start){ .ns = *cookie };
	if (ended.start.ns > NOT_MEASURED && now >= ended.start.ns)
		complete(&run, &ended, now, 1, 1);
	else if (ended.start.ns > NOT_MEASURED)
		count(&run.counters->mismatched);
	else if (probe_on)
		no_own_start(&run, ended.start.ns);
	return 0;
}

/* The same without a condition, groups, or a bound on the age: nothing has to be loaded from .rodata. */
SEC("fsession")
int call_session_lean(__u64 *ctx)
{
	__u64 now, start_ns;
	struct run run;

	if (!bpf_session_is_return(ctx)) {
		if (!probe_on) {
			*bpf_session_cookie(ctx) = NOT_MEASURED;
			return 0;
		}
		count(&counters_of(bpf_get_smp_processor_id())->started);
		*bpf_session_cookie(ctx) = bpf_ktime_get_ns();
		return 0;
	}
	now = bpf_ktime_get_ns();
	start_ns = *bpf_session_cookie(ctx);
	if (start_ns > NOT_MEASURED && now >= start_ns) {
		add_to_row(CERTAIN, now - start_ns, 1);
		return 0;
	}
	run.cpu = bpf_get_smp_processor_id();
	run.counters = counters_of(run.cpu);
	if (start_ns > NOT_MEASURED)
		count(&run.counters->mismatched);
	else if (probe_on)
		no_own_start(&run, start_ns);
	return 0;
}

/*
 * With more to keep than the time, that waits in the in-flight table, and the cookie
 * says in which slot: it is this call's own, as nobody else has it.
 */
static __always_inline __u64 cookie_of(struct dwell_slot *slot)
{
	return offset_from_state(slot) | IN_TABLE;
}

static __always_inline struct dwell_slot *slot_of(__u64 cookie)
{
	return at_offset(cookie & (DWELL_SETS * DWELL_WAYS - 1) * sizeof(struct dwell_slot));
}

static __always_inline int enter(__u64 *ctx)
{
	struct dwell_slot *set, *slot;
	struct subject subject;
	struct waiting stale;
	struct run run;
	__u64 cookie;

	if (!probe_on || !is_wanted(ctx, &subject)) {
		*bpf_session_cookie(ctx) = NOT_MEASURED;
		return 0;
	}
	run = run_of(ctx, 0);
	/* What still holds this frame has lost its exit. */
	if (state.overflow_live && take_from_hash(&run, &stale))
		overwrite(&run, &stale.start);
	set = set_of_frame(run.key);
	slot = find(set, run.key);
	if (slot)
		overwrite(&run, &slot->start);
	else
		slot = claim(set, run.key);
	count(&run.counters->started);
	run.group = call_group(ctx);
	if (slot) {
		keep_identity(slot, &subject.waiting.identity);
		fill(&slot->start, &run, skb_len(ctx));
		cookie = cookie_of(slot);
	} else {
		cookie = start_in_hash(&run, skb_len(ctx), &subject.waiting.identity) ? IN_HASH : NOWHERE;
	}
	*bpf_session_cookie(ctx) = cookie;
	return 0;
}

static __always_inline int leave(__u64 *ctx, __u64 now)
{
	__u64 cookie = *bpf_session_cookie(ctx);
	struct dwell_slot *slot;
	struct waiting ended;
	struct run run;

	run = run_of(ctx, bpf_get_current_task_btf());
	if (cookie & IN_TABLE) {
		slot = slot_of(cookie);
		copy_out(&ended, slot);
		release(slot);
	} else if (cookie != IN_HASH || !take_from_hash(&run, &ended)) {
		if (probe_on)
			no_own_start(&run, cookie);
		return 0;
	}
	if (now < ended.start.ns)
		count(&run.counters->mismatched);
	else
		complete(&run, &ended, now, 1, 1);
	return 0;
}

/* At the exit: it is now, or 0, so that it is asked for. */
FUNCTION int either_end(__u64 *ctx, __u64 now)
{
	if (bpf_session_is_return(ctx))
		return leave(ctx, now ?: bpf_ktime_get_ns());
	return enter(ctx);
}

SEC("fsession")
int call_session_table(__u64 *ctx)
{
	return either_end(ctx, 0);
}

/* The same, lean, with the packet as the first argument; what isn't in the first place of its set is left to the above. */
static __always_inline int lean_session(__u64 *ctx, enum events events)
{
	__u64 now, start_ns, latency, cookie, key, offset;
	struct dwell_slot *slot;

	if (!bpf_session_is_return(ctx)) {
		key = key_of_frame(ctx);
		offset = offset_of_set(key, DWELL_SETS - 1);
		slot = at_offset(offset);
		if (!probe_on || !take_free(slot, key))
			return either_end(ctx, 0);
		*bpf_session_cookie(ctx) = offset | IN_TABLE;
		slot->starts++;
		note_packet(&slot->start, ctx);
		slot->start.ns = bpf_ktime_get_ns();
		return 0;
	}
	now = bpf_ktime_get_ns();
	cookie = *bpf_session_cookie(ctx);
	if (!(cookie & IN_TABLE))
		return either_end(ctx, now);
	slot = slot_of(cookie);
	start_ns = slot->start.ns;
	if (now < start_ns)
		return either_end(ctx, now);
	latency = now - start_ns;
	add_to_row(CERTAIN, latency, 1);
	emit_lean(ctx, slot, latency, 1, events);
	release(slot);
	return 0;
}

SEC("fsession")
int call_session_lean_some(__u64 *ctx)
{
	return lean_session(ctx, SOME_EVENTS);
}

SEC("fsession")
int call_session_lean_all(__u64 *ctx)
{
	return lean_session(ctx, ALL_EVENTS);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
