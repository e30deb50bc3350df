/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What the kernel was doing as a span ended: its stack, for whom the CPU was working,
 * and how often the thread had been switched out since the start.
 */
#ifndef DWELL_STORY_H
#define DWELL_STORY_H

#include "inflight.bpf.h"
#include "shared.bpf.h"

/* Records have a story. */
const volatile __u32 with_story = 0;
/* Both ends are met by one thread. */
const volatile __u32 same_thread = 0;
/*
 * Where x86 counts what it is in: an offset from each CPU's own memory, and where the
 * table of these is. Looked up by user space, since kernels have it in different places,
 * and not all have types for it. Elsewhere tasks have a member for it.
 */
const volatile __u64 preempt_count_offset = 0;
const volatile __u64 per_cpu_offsets = 0;
/* The bits of that count which are set within hard interrupts, and NMIs. 0: unknown. */
const volatile __u32 hardirq_bits = 0;
const volatile __u32 nmi_bits = 0;

/*
 * Softirqs that are only disabled count by twice this, and so don't touch the bit. Nor
 * does what the kernel does before it runs a program: it disables preemption or
 * migration, which is counted below.
 */
#define SERVES_SOFTIRQ 0x100

static __always_inline long read_preempt_count(__u32 *count, const struct task_struct *task)
{
	__u64 base;
	long error;

	if (bpf_core_field_exists(task->thread_info.preempt_count))
		return BPF_CORE_READ_INTO(count, task, thread_info.preempt_count);
	error = bpf_probe_read_kernel(&base, sizeof(base), (void *)(per_cpu_offsets + 8 * bpf_get_smp_processor_id()));
	return error ?: bpf_probe_read_kernel(count, sizeof(*count), (void *)(base + preempt_count_offset));
}

static __always_inline __u32 context_of(const struct task_struct *task)
{
	__u32 count, softirqs, disabled;

	if (!hardirq_bits || !reads_memory || read_preempt_count(&count, task))
		return DWELL_UNKNOWN_CONTEXT;
	softirqs = count;
	/* Of PREEMPT_RT, where they are counted apart. */
	if (bpf_core_field_exists(task->softirq_disable_cnt)) {
		disabled = BPF_CORE_READ(task, softirq_disable_cnt);
		softirqs = disabled;
	}
	if (count & nmi_bits)
		return DWELL_NMI;
	if (count & hardirq_bits)
		return DWELL_HARDIRQ;
	if (softirqs & SERVES_SOFTIRQ)
		return DWELL_SOFTIRQ;
	return (__u32)bpf_get_current_pid_tgid() ? DWELL_TASK : DWELL_IDLE;
}

/* How often the running thread has been switched out in its life, if that is asked for. */
static __always_inline __u64 switches_so_far(void)
{
	const struct task_struct *task;

	if (!with_story || !same_thread || !reads_memory)
		return 0;
	task = (const struct task_struct *)bpf_get_current_task();
	return BPF_CORE_READ(task, nvcsw) + BPF_CORE_READ(task, nivcsw);
}

/* All but the switches. Returns the bytes of the stack, or an error. */
FUNCTION long fetch_story(void *ctx, struct dwell_story *story)
{
	story->context = context_of((const struct task_struct *)bpf_get_current_task());
	return bpf_get_stack(ctx, story->stack, sizeof(story->stack), 0);
}

static __always_inline void tell(struct dwell_record *r, const struct run *run, const struct dwell_start *start)
{
	struct dwell_story *story = &((struct dwell_full_record *)r)->story;

	__u64 switches = run->stint - start->stint;

	/* More than that, and it isn't the same task, or it has got another number. */
	if (!same_thread || !reads_memory || switches >> 32)
		switches = DWELL_UNKNOWN_SWITCHES;
	story->switches = switches;
	story->bytes = fetch_story((void *)run->ctx, story);
}

#endif
