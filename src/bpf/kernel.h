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
	BPF_MAP_TYPE_PERCPU_ARRAY = 6,
	BPF_MAP_TYPE_RINGBUF = 27,
};

enum {
	BPF_NOEXIST = 1,
	BPF_F_MMAPABLE = 1 << 10,
};

enum {
	EEXIST = 17,
};

enum {
	AF_INET = 2,
	AF_INET6 = 10,
};

enum {
	NFPROTO_IPV4 = 2,
	NFPROTO_IPV6 = 10,
};

enum {
	BPF_RB_NO_WAKEUP = 1,
	BPF_RB_FORCE_WAKEUP = 2,
};

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct in6_addr {
	__u8 s6_addr[16]; /* a macro in the kernel, for a member of a union: never relocated, only its size counts */
};

/* Anonymous in the kernel, which doesn't matter: what is behind the name counts. */
struct counter_64 {
	__s64 counter;
};

struct ns_common {
	unsigned int inum;
};

struct net {
	struct ns_common ns;
};

struct net_pointer {
	struct net *net;
};

struct kernfs_node {
	__u64 id;
};

struct cgroup {
	struct kernfs_node *kn;
	struct cgroup *ancestors[1]; /* from Linux 6.1 on; */
	__u64 ancestor_ids[1];       /* before */
	int level;
};

struct sock_cgroup_data {
	struct cgroup *cgroup; /* since Linux 5.15; */
	__u64 val;             /* before */
};

struct sock_common {
	__be32 skc_daddr;
	__be32 skc_rcv_saddr;
	__be16 skc_dport;
	__u16 skc_num; /* the local port, in host byte order */
	unsigned short skc_family;
	volatile unsigned char skc_state;
	int skc_bound_dev_if;
	struct in6_addr skc_v6_daddr;
	struct in6_addr skc_v6_rcv_saddr;
	struct net_pointer skc_net;
	struct counter_64 skc_cookie;
};

struct sock {
	struct sock_common __sk_common;
	__u16 sk_protocol;
	__u32 sk_mark;
	struct sock_cgroup_data sk_cgrp_data;
};

struct socket {
	struct sock *sk;
};

struct net_device {
	int ifindex;
	struct net_pointer nd_net;
};

struct sk_buff {
	struct sock *sk;
	struct net_device *dev; /* in a queue of a socket, something else is in its place */
	unsigned int len;
	__u8 tc_at_ingress : 1;
	__u8 vlan_present : 1; /* before Linux 6.2; */
	__u32 vlan_all;        /* since, not 0 */
	__u16 vlan_tci;
	__u16 queue_mapping;
	__u32 hash;
	__u32 mark;
	int skb_iif;
	__be16 protocol;
	__u16 mac_header;     /* an offset from head, as the next */
	__u16 network_header;
	unsigned int tail;    /* an offset from head on 64-bit machines */
	unsigned char *head;
	unsigned char *data;
};

struct nf_hook_state {
	__u8 hook;
	__u8 pf;
};

struct css_set {
	struct cgroup *dfl_cgrp;
};

struct thread_info {
	__u32 preempt_count; /* not on x86; of arm64's 64 bits the lower half */
};

struct task_struct {
	struct thread_info thread_info;
	void *stack;
	struct css_set *cgroups;
	int pid;  /* user space's tid */
	int tgid; /* user space's pid */
	char comm[16];
	unsigned long nvcsw;  /* times it gave up its CPU */
	unsigned long nivcsw; /* times it was preempted */
	int softirq_disable_cnt; /* with PREEMPT_RT alone */
};

#pragma clang attribute pop

#endif
