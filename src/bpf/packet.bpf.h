/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Whose packet it is that a span starts with: read from its headers where it has
 * them, else from its socket; where there is no packet, from the socket alone.
 * What can't be told stays unknown.
 */
#ifndef DWELL_PACKET_H
#define DWELL_PACKET_H

#include "args.bpf.h"
#include "flow.bpf.h"
#include "inflight.bpf.h"
#include "shared.bpf.h"

/* Where a packet is carried within another, the inner one counts. */
const volatile __u32 inner_headers = 0;

enum {
	ETH_HLEN = 14,
	VLAN_HLEN = 4,
	UDP_HLEN = 8,
	VXLAN_HLEN = 8,
	VXLAN_PORT = 4789,
};

enum subject_source {
	SUBJECT_SKB,
	SUBJECT_SOCK,
	SUBJECT_SOCKET,
	SUBJECT_TASK, /* there is neither packet nor socket */
	SUBJECT_NOTHING, /* there may be, but it can't be read */
};

/* What a span starts with, as far as is known. */
struct subject {
	struct waiting waiting; /* its identity; the rest is for who puts it away */
	__u64 cgroup; /* address of the socket's, or, where there is no socket to ask, of the task's */
};

/* The lowest inode that a namespace can have; the initial ones have fixed ones just below 0xF0000000. */
#define FIRST_NAMESPACE 0xEFFFFF00

/*
 * Copies it onto itself. What a helper has written the verifier knows nothing of, so
 * that it goes on once, and not once for each way that led here.
 */
static __always_inline void merge_ways(struct dwell_identity *id)
{
	if (reads_memory)
		bpf_probe_read_kernel(id, sizeof(*id), id);
}

static __always_inline int is_vlan(__be16 protocol)
{
	return protocol == bpf_htons(0x8100) || protocol == bpf_htons(0x88a8);
}

static __always_inline int is_ip(__be16 protocol)
{
	return protocol == bpf_htons(0x0800) || protocol == bpf_htons(0x86dd);
}

static __always_inline void identify_netns(const struct net *net, struct dwell_identity *id)
{
	__u32 inode;

	if (!net || id->known & DWELL_KNOWS_NETNS)
		return;
	inode = net->ns.inum;
	if (inode < FIRST_NAMESPACE)
		return;
	id->netns = inode;
	learn(id, DWELL_KNOWS_NETNS);
}

/* Kernels without network namespaces have no such pointers. */
static __always_inline const struct net *net_of_sock(const struct sock *sk)
{
	return bpf_core_field_exists(sk->__sk_common.skc_net.net) ? sk->__sk_common.skc_net.net : 0;
}

/*
 * In a socket's queue there is something else in the place of the device. Who
 * believes in it would follow a number; an address of user space some kernels
 * don't even catch.
 */
static __always_inline void identify_interface(const struct sk_buff *skb, struct dwell_identity *id)
{
	const struct net_device *dev = skb->dev;
	const struct net *net;
	__s32 index;

	if ((__s64)address((__u64)dev) >= 0 || !bpf_core_field_exists(dev->nd_net.net))
		return;
	index = dev->ifindex;
	net = dev->nd_net.net;
	if (index <= 0 || !net || net->ns.inum < FIRST_NAMESPACE)
		return;
	id->interface = index;
	learn(id, DWELL_KNOWS_INTERFACE);
	identify_netns(net, id);
}

static __always_inline void identify_vlan(const struct sk_buff *skb, struct dwell_identity *id)
{
	int is_tagged;

	if (bpf_core_field_exists(skb->vlan_present))
		is_tagged = BPF_CORE_READ_BITFIELD(skb, vlan_present);
	else
		is_tagged = !!skb->vlan_all;
	if (!is_tagged)
		return;
	id->vlan = skb->vlan_tci & 0xfff;
	learn(id, DWELL_KNOWS_VLAN);
}

/*
 * Where the IP header begins; 0: that isn't known. A tag that the network device
 * didn't take off comes first on the way in, and lies before it on the way out.
 */
static __always_inline __u32 start_of_ip(const struct sk_buff *skb, struct dwell_identity *id)
{
	__u32 at = skb->network_header, mac = skb->mac_header;
	__be16 protocol = skb->protocol;
	__be16 tag[2];

	if (!at || at == 0xffff)
		return 0;
	/* On the way out it isn't set everywhere. */
	if (protocol && !is_ip(protocol) && !is_vlan(protocol))
		learn(id, DWELL_KNOWS_NOT_IP);
	if (!is_vlan(protocol) || mac == 0xffff || header(skb, tag, sizeof(tag), mac + ETH_HLEN))
		return at;
	if (!(id->known & DWELL_KNOWS_VLAN)) {
		id->vlan = bpf_ntohs(tag[0]) & 0xfff;
		learn(id, DWELL_KNOWS_VLAN);
	}
	if (at != mac + ETH_HLEN)
		return at;
	at += VLAN_HLEN;
	if (!is_vlan(tag[1]))
		return at;
	return at + VLAN_HLEN;
}

/* So much of a TCP header is read. */
#define TCP_FLAGS_END 14

/* `room` is where the IP header was, which nobody needs any more: the stack is short, and has no room for another. */
static __always_inline void identify_ports(const struct sk_buff *skb, __u32 at, __u8 room[IP_HLEN],
					   struct dwell_identity *id)
{
	if (!has_ports(id->flow.protocol)) {
		learn(id, DWELL_KNOWS_NO_PORTS);
		return;
	}
	/* Source and destination port lie side by side, in all of these. */
	if (header(skb, &id->flow.sport, 4, at))
		return;
	learn(id, DWELL_KNOWS_SPORT | DWELL_KNOWS_DPORT);
	/* No filter asks for what follows. */
	if (!with_identity || id->flow.protocol != IPPROTO_TCP || header(skb, room, TCP_FLAGS_END, at))
		return;
	id->seq = (__u32)room[4] << 24 | room[5] << 16 | room[6] << 8 | room[7];
	id->tcp_flags = room[TCP_FLAGS_END - 1];
	learn(id, DWELL_KNOWS_TCP);
}

/* From the IP header at `at` on; where the transport's is, or 0: there is none. */
FUNCTION int identify_headers(const struct sk_buff *skb, __u32 at, struct dwell_identity *id)
{
	__u32 transport = 0;
	__u8 ip[IP_HLEN], version;

	if (header(skb, ip, sizeof(ip), at))
		return 0;
	version = ip[0] >> 4;
	if (version == 4)
		transport = flow_of_ipv4(ip, at, &id->flow, id);
	else if (version == 6)
		transport = flow_of_ipv6(skb, ip, at, &id->flow, id);
	else
		learn(id, DWELL_KNOWS_NOT_IP);
	if (!(id->known & DWELL_KNOWS_ADDRESSES)) {
		/* What has been read of it isn't known. */
		id->flow = (struct dwell_flow){};
		return 0;
	}
	id->flow.version = version;
	learn(id, DWELL_KNOWS_VERSION);
	if (transport)
		identify_ports(skb, transport, ip, id);
	return transport;
}

/* Where the packet within this one begins; 0: there is none. What it is, if it is in a frame, is in `type`. */
static __always_inline __u32 start_of_inner(const struct sk_buff *skb, const struct dwell_identity *id, __u32 at,
					    __be16 *type)
{
	if (id->flow.protocol == IPPROTO_IPIP || id->flow.protocol == IPPROTO_IPV6)
		return at;
	if (id->flow.protocol != IPPROTO_UDP || id->flow.dport != bpf_htons(VXLAN_PORT))
		return 0;
	at += UDP_HLEN + VXLAN_HLEN + ETH_HLEN;
	*type = 0;
	if (header(skb, type, sizeof(*type), at - sizeof(*type)) || !is_vlan(*type))
		return at;
	at += VLAN_HLEN;
	*type = 0;
	header(skb, type, sizeof(*type), at - sizeof(*type));
	return at;
}

/* All that headers tell, and nothing else. */
#define DWELL_KNOWS_HEADERS                                                                                   \
	(DWELL_KNOWS_VERSION | DWELL_KNOWS_PROTOCOL | DWELL_KNOWS_ADDRESSES | DWELL_KNOWS_SPORT |             \
	 DWELL_KNOWS_DPORT | DWELL_KNOWS_HEADER | DWELL_KNOWS_TCP | DWELL_KNOWS_NOT_IP | DWELL_KNOWS_NO_PORTS)

static __always_inline void forget_headers(struct dwell_identity *id)
{
	id->flow = (struct dwell_flow){};
	id->seq = 0;
	id->tos = 0;
	id->ttl = 0;
	id->tcp_flags = 0;
	forget(id, DWELL_KNOWS_HEADERS);
}

/* Whether there are any yet. */
static __always_inline int parse_headers(const struct sk_buff *skb, struct dwell_identity *id)
{
	__u32 at = start_of_ip(skb, id), transport;
	__be16 type = bpf_htons(0x0800);

	if (!at)
		return 0;
	if (id->known & DWELL_KNOWS_NOT_IP)
		return 1;
	transport = identify_headers(skb, at, id);
	if (!inner_headers || !transport)
		return 1;
	at = start_of_inner(skb, id, transport, &type);
	if (!at)
		return 1;
	forget_headers(id);
	if (is_ip(type))
		identify_headers(skb, at, id);
	else if (type)
		learn(id, DWELL_KNOWS_NOT_IP);
	return 1;
}

static __always_inline __u64 cgroup_of_sock(const struct sock *sk)
{
	__u64 value;

	if (bpf_core_field_exists(sk->sk_cgrp_data.cgroup))
		return address((__u64)sk->sk_cgrp_data.cgroup);
	if (!bpf_core_field_exists(sk->sk_cgrp_data.val))
		return 0;
	/* A pointer as well, unless it is something of version 1's. */
	value = sk->sk_cgrp_data.val;
	return value & 3 ? 0 : value;
}

static __always_inline int is_inet(const struct sock *sk)
{
	__u16 family = sk->__sk_common.skc_family;

	return family == AF_INET || family == AF_INET6;
}

/* What a socket tells of itself, whatever becomes of the packet. */
static __always_inline void identify_owner(const struct sock *sk, struct subject *subject)
{
	struct dwell_identity *id = &subject->waiting.identity;
	__u64 cookie = sk->__sk_common.skc_cookie.counter;

	identify_netns(net_of_sock(sk), id);
	if (cookie) {
		id->cookie = cookie;
		learn(id, DWELL_KNOWS_COOKIE);
	}
	if (is_full(sk))
		subject->cgroup = cgroup_of_sock(sk);
}

/* What it would send: all of it if it has a peer, else what is its own. */
static __always_inline void identify_flow_of_sock(const struct sock *sk, struct dwell_identity *id)
{
	const __u32 all = DWELL_KNOWS_VERSION | DWELL_KNOWS_PROTOCOL | DWELL_KNOWS_ADDRESSES;

	if (!is_inet(sk))
		return;
	id->direction = DWELL_OUTGOING;
	if (flow_of_sock(sk, &id->flow)) {
		learn(id, all);
	} else {
		id->flow.protocol = protocol_of_sock(sk);
		learn(id, DWELL_KNOWS_PROTOCOL);
		if (sk->__sk_common.skc_family == AF_INET) {
			id->flow.version = 4;
			learn(id, DWELL_KNOWS_VERSION);
		}
	}
	if (!has_ports(id->flow.protocol)) {
		/* A raw socket has its protocol in the place of a port. */
		id->flow.sport = 0;
		id->flow.dport = 0;
		learn(id, DWELL_KNOWS_NO_PORTS);
		return;
	}
	id->flow.sport = bpf_htons(sk->__sk_common.skc_num);
	if (id->flow.sport)
		learn(id, DWELL_KNOWS_SPORT);
	if (id->flow.dport)
		learn(id, DWELL_KNOWS_DPORT);
}

/* Loaded once: the verifier believes in what was compared with NULL. */
static __always_inline void identify_sock(const struct sock *sk, struct subject *subject)
{
	struct dwell_identity *id = &subject->waiting.identity;

	if (!sk)
		return;
	identify_owner(sk, subject);
	identify_flow_of_sock(sk, id);
	if (is_full(sk) && is_inet(sk)) {
		id->mark = sk->sk_mark;
		learn(id, DWELL_KNOWS_MARK);
	}
}

/*
 * Whether a packet has left its socket's network namespace, as through a veth: the
 * socket goes along until IP takes it, and isn't this host's.
 */
static __always_inline int is_foreign(const struct sock *sk, const struct dwell_identity *id)
{
	const struct net *net = net_of_sock(sk);

	return net && id->known & DWELL_KNOWS_NETNS && net->ns.inum != id->netns;
}

/* Which way a packet goes that has this socket, if its ports tell that; they needn't, where they were translated. */
static __always_inline __u8 direction_by(const struct sock *sk, const struct dwell_identity *id)
{
	const __u32 ports = DWELL_KNOWS_SPORT | DWELL_KNOWS_DPORT;
	__be16 own = bpf_htons(sk->__sk_common.skc_num);
	__u8 direction = DWELL_UNKNOWN_DIRECTION;

	if (!is_inet(sk) || (id->known & ports) != ports)
		return direction;
	if (id->flow.sport == own)
		direction += DWELL_OUTGOING;
	if (id->flow.dport == own)
		direction += DWELL_INCOMING;
	return direction > DWELL_INCOMING ? DWELL_UNKNOWN_DIRECTION : direction;
}

/* `argument` is the function's own socket, if it has one: a packet may not yet, or no longer, have its own. */
static __always_inline void identify_skb(const struct sk_buff *skb, const struct sock *argument,
					 struct subject *subject)
{
	struct dwell_identity *id = &subject->waiting.identity;
	const struct sock *sk;
	int has_headers;

	if (!skb)
		return;
	id->len = skb->len;
	id->mark = skb->mark;
	id->hash = skb->hash;
	id->queue = skb->queue_mapping;
	id->received_on = skb->skb_iif;
	learn(id, DWELL_KNOWS_PACKET | DWELL_KNOWS_MARK | DWELL_KNOWS_QUEUE);
	if (id->received_on)
		learn(id, DWELL_KNOWS_RECEIVED);
	identify_vlan(skb, id);
	has_headers = parse_headers(skb, id);
	merge_ways(id);
	identify_interface(skb, id);
	sk = skb->sk;
	if (!sk)
		sk = argument;
	if (sk && !is_foreign(sk, id)) {
		identify_owner(sk, subject);
		if (has_headers || id->received_on)
			id->direction = direction_by(sk, id);
		else
			identify_flow_of_sock(sk, id);
	}
	if (!id->direction && id->received_on)
		id->direction = DWELL_INCOMING;
}

/*
 * Finds out what a span starts with; `word` of the context is where that is, and of a
 * packet `sock_word` where a socket is as well, or NO_WORD. Returns 1,
 * which callers must look at: what isn't, compilers don't return, and a pointer that
 * they leave in its place the verifier doesn't let out.
 */
FUNCTION int find_subject(const __u64 *ctx, __u32 source, __u32 word, __u32 sock_word, struct subject *subject)
{
	const struct task_struct *task;
	const struct socket *socket;
	struct dwell_identity *id = &subject->waiting.identity;
	const struct cgroup *cgroup;
	int done = 1;

	*id = (struct dwell_identity){};
	subject->cgroup = 0;
	if (source == SUBJECT_TASK) {
		task = (const struct task_struct *)bpf_get_current_task();
		if (reads_memory && bpf_core_field_exists(task->cgroups))
			subject->cgroup = (__u64)BPF_CORE_READ(task, cgroups, dfl_cgrp);
	} else if (source == SUBJECT_SKB) {
		identify_skb((const struct sk_buff *)ctx_word(ctx, word), (const struct sock *)ctx_word(ctx, sock_word),
			     subject);
	} else if (source == SUBJECT_SOCK) {
		identify_sock((const struct sock *)ctx_word(ctx, word), subject);
	} else if (source == SUBJECT_SOCKET) {
		socket = (const struct socket *)ctx_word(ctx, word);
		if (socket)
			identify_sock(socket->sk, subject);
	}
	cgroup = (const struct cgroup *)subject->cgroup;
	/* Filters by cgroup follow its address. */
	if (with_identity && reads_memory && cgroup) {
		id->cgroup = BPF_CORE_READ(cgroup, kn, id);
		if (id->cgroup)
			learn(id, DWELL_KNOWS_CGROUP);
	}
	merge_ways(id);
	asm volatile("" : "+r"(done));
	return done;
}

#endif
