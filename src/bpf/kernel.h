/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The few kernel types and constants that the programs need, declared by hand.
 *
 * Every struct carries preserve_access_index, so the offsets below are only
 * placeholders: libbpf rewrites them from the BTF of the kernel it loads into
 * (CO-RE). That keeps the build independent of the build host's kernel, and of
 * its having BTF at all. The constants are user-space ABI and never change.
 */
#ifndef DWELL_KERNEL_H
#define DWELL_KERNEL_H

typedef unsigned char __u8;
typedef unsigned short __u16;
typedef unsigned int __u32;
typedef unsigned long long __u64;
typedef signed char __s8;
typedef short __s16;
typedef int __s32;
typedef long long __s64;

/* Named in the declarations of libbpf's bpf_helper_defs.h. */
typedef __u16 __be16;
typedef __u32 __be32;
typedef __u32 __wsum;

enum {
	BPF_MAP_TYPE_HASH = 1,
	BPF_MAP_TYPE_ARRAY = 2,
	BPF_MAP_TYPE_RINGBUF = 27,
};

enum {
	BPF_NOEXIST = 1,
};

enum {
	BPF_RB_NO_WAKEUP = 1,
	BPF_RB_FORCE_WAKEUP = 2,
};

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct sk_buff {
	unsigned int len;
};

struct task_struct {
	void *stack;
	int pid;  /* user space's tid */
	int tgid; /* user space's pid */
	char comm[16];
	unsigned long nvcsw;  /* times it gave up its CPU */
	unsigned long nivcsw; /* times it was preempted */
};

#pragma clang attribute pop

#endif
