/* The inner loops of parameter updates, over float32.
 *
 * Each is one pass over memory: every array is read once and written once, and this memory traffic is the cost of an
 * update. They are compiled with vectorisation (setup.py), and written so that it applies: no branch, restricted
 * pointers, constants computed before the loop. All arithmetic is in float32, in the order in which NumPy does it.
 *
 * The new parameter is written to q, which is p itself or memory apart from it: a table's next version is made beside
 * the one that others read. So p and q are not `restrict`, and ivdep says that no element depends on another one.
 */
#ifndef FRT_OPTIMIZER_H
#define FRT_OPTIMIZER_H

#include <math.h>
#include <stddef.h>

typedef struct {
    float lr, decay;     /* decay: weight decay, added to the gradient, or (Adam) subtracted apart from it */
    float beta1, beta2;  /* Adam: decay rates of the two means; momentum: beta1 */
    float keep1, keep2;  /* 1 - beta1, 1 - beta2 */
    float eps;
    float scale;         /* Adam: 1 / sqrt(1 - beta2^step) */
    float l1, l2;
} frt_update;

#define FRT_EACH(i, n) _Pragma("GCC ivdep") for (size_t i = 0; i < (n); i++)

static inline void frt_sgd(const float *p, float *q, const float *restrict g, size_t n, const frt_update *u) {
    const float lr = u->lr, decay = u->decay;
    FRT_EACH(i, n) q[i] = p[i] - lr * (g[i] + decay * p[i]);
}

static inline void frt_momentum(const float *p, float *q, const float *restrict g, float *restrict v, size_t n,
                                const frt_update *u) {
    const float lr = u->lr, decay = u->decay, mu = u->beta1;
    FRT_EACH(i, n) {
        v[i] = mu * v[i] + (g[i] + decay * p[i]);
        q[i] = p[i] - lr * v[i];
    }
}

static inline void frt_nesterov(const float *p, float *q, const float *restrict g, float *restrict v, size_t n,
                                const frt_update *u) {
    const float lr = u->lr, decay = u->decay, mu = u->beta1;
    FRT_EACH(i, n) {
        const float d = g[i] + decay * p[i];
        v[i] = mu * v[i] + d;
        q[i] = p[i] - lr * (d + mu * v[i]);
    }
}

static inline void frt_adagrad(const float *p, float *q, const float *restrict g, float *restrict a, size_t n,
                               const frt_update *u) {
    const float lr = u->lr, decay = u->decay, eps = u->eps;
    FRT_EACH(i, n) {
        const float d = g[i] + decay * p[i];
        a[i] += d * d;
        q[i] = p[i] - lr * d / (sqrtf(a[i]) + eps);
    }
}

/* lr is already divided by 1 - beta1^step, decay already multiplied by the learning rate. */
static inline void frt_adam(const float *p, float *q, const float *restrict g, float *restrict m,
                            float *restrict v, size_t n, const frt_update *u) {
    const float lr = u->lr, decay = u->decay, b1 = u->beta1, b2 = u->beta2, k1 = u->keep1, k2 = u->keep2;
    const float eps = u->eps, scale = u->scale;
    FRT_EACH(i, n) {
        m[i] = b1 * m[i] + k1 * g[i];
        v[i] = b2 * v[i] + k2 * (g[i] * g[i]);
        q[i] = (p[i] - decay * p[i]) - lr * m[i] / (sqrtf(v[i]) * scale + eps);
    }
}

/* lr is the inverse of the learning rate. */
static inline void frt_ftrl(const float *p, float *q, const float *restrict g, float *restrict a,
                            float *restrict z, size_t n, const frt_update *u) {
    const float inverse = u->lr, l1 = u->l1, l2 = u->l2;
    FRT_EACH(i, n) {
        const float sum = a[i] + g[i] * g[i], root = sqrtf(sum);
        z[i] += g[i] - (root - sqrtf(a[i])) * inverse * p[i];
        a[i] = sum;
        const float over = fabsf(z[i]) - l1;
        const float kept = over > 0.0f ? over : 0.0f;
        q[i] = -copysignf(kept, z[i]) / (root * inverse + l2);
    }
}

#endif
