// cc: -O2 -lipt
// Every packet of a raw Intel PT buffer as libipt reads it, one a line: offset, size, and the text of `ptwprobe dump`.
// Ends at the first that libipt does not know.
//
//     ipt_packets AUX

#include <intel-pt.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

static void print_ip(const char *name, const struct pt_packet_ip *ip)
{
	if (ip->ipc == pt_ipc_suppressed)
		printf("%s no ip\n", name);
	else
		printf("%s %d: 0x%" PRIx64 "\n", name, ip->ipc, ip->ip);
}

static void print_tnt(const char *name, const struct pt_packet_tnt *tnt)
{
	printf("%s ", name);
	for (int bit = tnt->bit_size - 1; bit >= 0; bit--)
		putchar(tnt->payload >> bit & 1 ? 'T' : 'N');
	putchar('\n');
}

static void print_mode(const struct pt_packet_mode *mode)
{
	if (mode->leaf == pt_mol_exec)
		printf("MODE.Exec cs.l %d cs.d %d\n", mode->bits.exec.csl, mode->bits.exec.csd);
	else
		printf("MODE.TSX intx %d abort %d\n", mode->bits.tsx.intx, mode->bits.tsx.abrt);
}

static void print_power(const struct pt_packet *packet)
{
	const struct pt_packet_pwrx *pwrx = &packet->payload.pwrx;
	int wake = pwrx->interrupt | pwrx->store << 2 | pwrx->autonomous << 3;
	const struct pt_packet_pwre *pwre = &packet->payload.pwre;
	if (packet->type == ppt_pwrx)
		printf("PWRX last %d deepest %d wake 0x%x\n", pwrx->last, pwrx->deepest, wake);
	else
		printf("PWRE c-state 0x%x\n", pwre->state << 4 | pwre->sub_state);
}

static void print(const struct pt_packet *packet)
{
	switch (packet->type) {
	case ppt_pad: puts("PAD"); break;
	case ppt_psb: puts("PSB"); break;
	case ppt_psbend: puts("PSBEND"); break;
	case ppt_ovf: puts("OVF"); break;
	case ppt_stop: puts("TraceStop"); break;
	case ppt_fup: print_ip("FUP", &packet->payload.ip); break;
	case ppt_tip: print_ip("TIP", &packet->payload.ip); break;
	case ppt_tip_pge: print_ip("TIP.PGE", &packet->payload.ip); break;
	case ppt_tip_pgd: print_ip("TIP.PGD", &packet->payload.ip); break;
	case ppt_tnt_8: print_tnt("TNT.8", &packet->payload.tnt); break;
	case ppt_tnt_64: print_tnt("TNT.64", &packet->payload.tnt); break;
	case ppt_mode: print_mode(&packet->payload.mode); break;
	case ppt_pip: printf("PIP cr3 0x%" PRIx64 " nr %d\n", packet->payload.pip.cr3, packet->payload.pip.nr); break;
	case ppt_vmcs: printf("VMCS 0x%" PRIx64 "\n", packet->payload.vmcs.base); break;
	case ppt_cbr: printf("CBR %d\n", packet->payload.cbr.ratio); break;
	case ppt_tsc: printf("TSC 0x%" PRIx64 "\n", packet->payload.tsc.tsc); break;
	case ppt_tma: printf("TMA ctc 0x%x fast 0x%x\n", packet->payload.tma.ctc, packet->payload.tma.fc); break;
	case ppt_mtc: printf("MTC 0x%x\n", packet->payload.mtc.ctc); break;
	case ppt_cyc: printf("CYC %" PRIu64 "\n", packet->payload.cyc.value); break;
	case ppt_mnt: printf("MNT 0x%" PRIx64 "\n", packet->payload.mnt.payload); break;
	case ppt_exstop: printf("EXSTOP%s\n", packet->payload.exstop.ip ? " ip" : ""); break;
	case ppt_mwait:
		printf("MWAIT hints 0x%x ext 0x%x\n", packet->payload.mwait.hints, packet->payload.mwait.ext);
		break;
	case ppt_pwre:
	case ppt_pwrx: print_power(packet); break;
	case ppt_ptw:
		printf("PTW.%d 0x%" PRIx64 "%s\n", pt_ptw_size(packet->payload.ptw.plc), packet->payload.ptw.payload,
		       packet->payload.ptw.ip ? " ip" : "");
		break;
	default: puts("?"); break;
	}
}

int main(int argc, char **argv)
{
	static uint8_t trace[1 << 20];
	FILE *file = argc == 2 ? fopen(argv[1], "rb") : NULL;
	if (!file)
		return 2;
	struct pt_config config;
	pt_config_init(&config);
	config.begin = trace;
	config.end = trace + fread(trace, 1, sizeof(trace), file);
	fclose(file);
	struct pt_packet_decoder *decoder = pt_pkt_alloc_decoder(&config);
	if (!decoder || pt_pkt_sync_forward(decoder) < 0)
		return 2;
	for (;;) {
		struct pt_packet packet;
		uint64_t offset;
		if (pt_pkt_get_offset(decoder, &offset) < 0 || pt_pkt_next(decoder, &packet, sizeof(packet)) < 0)
			break;
		printf("%" PRIu64 " %d ", offset, packet.size);
		print(&packet);
	}
	pt_pkt_free_decoder(decoder);
	return 0;
}
