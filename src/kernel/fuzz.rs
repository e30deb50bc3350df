//! What others wrote of the kernel, with all that is asked of it; see [`crate::fuzz`].

use std::sync::Arc;

use super::btf::Btf;
use super::index::Index;
use super::symbolizer::Symbolizer;
use super::symbols::Symbols;

/// Type information, and the same as a module's on top of itself. Whether it is any.
pub fn btf(data: &[u8]) -> bool {
    let Ok(index) = Index::parse(data.to_vec(), None) else { return false };
    ask(&index);
    if let Ok(module) = Index::parse(data.to_vec(), Some(&index)) {
        ask(&module);
    }
    true
}

fn ask(index: &Index) {
    let btf: &Btf = index.btf();
    let signatures = btf.own_types().flat_map(|(id, _)| [btf.signature(id), btf.tracepoint(id)]).flatten();
    for signature in signatures {
        let words = signature.words();
        assert!(signature.word_of(0) == 0 && signature.word_of(1) <= words);
        signature.params.iter().for_each(|param| drop(param.to_string()));
    }
    for (id, ty) in btf.own_types() {
        let _ = (btf.enumerators(id), btf.underlying(id), btf.member_offset(&ty, "len"));
    }
    for name in index.function_names() {
        assert!(!name.is_empty() || index.functions(name).len() < usize::MAX);
    }
    for name in index.tracepoint_names().take(64) {
        let _ = index.tracepoint(name);
    }
    let _ = (index.enumerators("skb_drop_reason"), index.member_offset("sk_buff", "len"));
}

/// A list of symbols. Whether there is one in it.
pub fn kallsyms(data: &[u8]) -> bool {
    let symbols = Symbols::canned(data);
    for name in ["ip_rcv", "", "a", "\u{10ffff}"] {
        let _ = (symbols.code_in_kernel(name), symbols.code_in_module("m", name, false));
    }
    let symbolizer = Arc::new(Symbolizer::canned(data));
    // Of what is listed the first few, since names are kept for ever.
    let text = String::from_utf8_lossy(data);
    let listed = text.lines().filter_map(|line| u64::from_str_radix(line.split_ascii_whitespace().next()?, 16).ok());
    let mut any = false;
    for address in listed.take(4).flat_map(|address| [address, address.wrapping_add(0x10)]).chain([0, u64::MAX]) {
        if let Some(symbol) = symbolizer.resolve(address) {
            any = true;
            let begin = address.checked_sub(symbol.offset).filter(|begin| *begin != 0);
            let begin = begin.and_then(|begin| symbolizer.resolve(begin));
            assert_eq!(begin.map(|begin| (begin.name, begin.offset)), Some((symbol.name, 0)), "{address:#x} {symbol}");
            assert!(!symbol.function().is_empty() || symbol.name.is_empty());
            let _ = symbolizer.address_of(&symbol.name, symbol.module.as_deref());
        }
        let _ = symbolizer.resolve_return(address);
    }
    any
}
