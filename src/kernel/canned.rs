//! BTF for tests, written as the kernel would.

use super::btf::{Btf, kind};
use super::btf_writer::Writer;

/// What functions and tracepoints take.
impl Writer {
    /// A module's, whose base is vmlinux's.
    pub(super) fn on_top_of(base: &Btf) -> Self {
        Self { types: Vec::new(), strings: Vec::new(), first_string: base.end_string(), next_id: base.end_id() }
    }

    pub(super) fn proto(&mut self, ret: u32, params: &[(&str, u32)]) -> u32 {
        let tail: Vec<u32> = params.iter().flat_map(|&(name, ty)| [self.string(name), ty]).collect();
        self.add("", kind::FUNC_PROTO, params.len() as u32, 0, ret, &tail)
    }

    pub(super) fn func(&mut self, name: &str, ret: u32, params: &[(&str, u32)]) -> u32 {
        let proto = self.proto(ret, params);
        self.add(name, kind::FUNC, 0, 0, proto, &[])
    }

    pub(super) fn pointer(&mut self, to: u32) -> u32 {
        self.add("", kind::PTR, 0, 0, to, &[])
    }

    /// As the kernel describes the tracepoint: without the names of its arguments.
    pub(super) fn tracepoint(&mut self, name: &str, params: &[u32]) -> u32 {
        let data = self.pointer(0);
        let params: Vec<_> = [data].iter().chain(params).map(|&ty| ("", ty)).collect();
        let proto = self.proto(0, &params);
        let pointer = self.pointer(proto);
        self.add(&format!("btf_trace_{name}"), kind::TYPEDEF, 0, 0, pointer, &[])
    }

    pub(super) fn enumeration(&mut self, name: &str, values: &[(&str, u32)]) -> u32 {
        let tail: Vec<u32> = values.iter().flat_map(|&(name, value)| [self.string(name), value]).collect();
        self.add(name, kind::ENUM, values.len() as u32, 0, 4, &tail)
    }
}

const SIGNED_INT: u32 = 1 << 24 | 32;

/// A little kernel. Type 1 is `int`, 4 is `const struct sk_buff *`.
pub(super) fn vmlinux() -> Writer {
    let mut w = Writer::new();
    let int = w.add("int", kind::INT, 0, 0, 4, &[SIGNED_INT]);
    let skb = w.add("sk_buff", kind::STRUCT, 0, 0, 232, &[]);
    let constant = w.add("", kind::CONST, 0, 0, skb, &[]);
    let skb_ptr = w.pointer(constant);
    let alias = w.add("skb_t", kind::TYPEDEF, 0, 0, skb_ptr, &[]);
    let plain_ptr = w.pointer(skb);
    let double_ptr = w.pointer(plain_ptr);
    let pair = w.add("pair", kind::STRUCT, 0, 0, 16, &[]);
    let reason = w.enumeration("skb_drop_reason", &[("SKB_NOT_DROPPED_YET", 0), ("SKB_CONSUMED", 1)]);
    let big = [w.string("BIG"), 7, 1];
    w.add("wide", kind::ENUM64, 1, 0, 8, &big);
    let constant_ptr = w.add("", kind::CONST, 0, 0, plain_ptr, &[]);
    let callback_proto = w.proto(int, &[("skb", plain_ptr)]);
    let callback = w.pointer(callback_proto);
    let anonymous = w.add("", kind::UNION, 0, 0, 8, &[]);
    let tagged = w.add("user", kind::TYPE_TAG, 0, 0, int, &[]);
    let user_ptr = w.pointer(tagged);

    w.func("ip_rcv", int, &[("skb", alias), ("n", int)]);
    w.func("by_value", 0, &[("pair", pair), ("n", int)]);
    w.func("printf_like", reason, &[("skb", skb_ptr), ("", 0)]);
    w.func("odd", pair, &[]);
    w.func(
        "texts",
        plain_ptr,
        &[("a", double_ptr), ("b", constant_ptr), ("okfn", callback), ("", anonymous), ("p", user_ptr)],
    );
    w.func("merged", int, &[("skb", plain_ptr)]);
    w.func("specialised", int, &[("skb", plain_ptr)]);
    w.func("split", int, &[("skb", plain_ptr)]);
    w.func("state_show", int, &[("skb", plain_ptr)]);
    w.func("twice", int, &[("skb", plain_ptr)]);
    w.func("twice", int, &[("unused", plain_ptr)]);
    w.func("differs", int, &[("skb", plain_ptr)]);
    w.func("differs", int, &[("n", int)]);
    w.func("__traceiter_kfree_skb", int, &[("__data", plain_ptr), ("skb", plain_ptr), ("reason", reason)]);
    w.tracepoint("kfree_skb", &[plain_ptr, reason]);
    w.tracepoint("netif_rx", &[plain_ptr]);
    w
}
